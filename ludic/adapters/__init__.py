"""Adapters to other people's programs: environments, judges, imports, exports, trackers, clusters, names of settings.

The core never imports them: it finds one by name when it is used (ludic.by_name). Only ludic.operations, ludic.demos
and ludic.cli, which stand above, import them, when a method is called.
"""
