"""Record the rollouts and steps of another program's trainer in a root: `ludic.record`.

Modules, each built on those before it: rows fills in missing values; groups reads the caller's groups; losses counts
rows that were not stored; life writes the files of one recorder; queue runs life in a thread; recorder is the API that
a trainer calls. Imports no torch and runs no SQL.
"""
