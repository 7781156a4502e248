"""Adapters to other people's programs: environments, judges, imports, exports, trackers, clusters, names of settings.

Nothing imports them: each is found by name when it is used, as a part of a kind (ludic.settings.kinds) or by
ludic.base.by_name. A part that another package brings by an entry point takes the same place.
"""
