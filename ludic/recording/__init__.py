"""Record the rollouts and steps of another program's trainer in a root: `ludic.record`.

Chapters, each on those before it: rows, what a row has that nobody gave; groups, what a caller gives; losses, what was
not stored; life, the files of one recorder; queue, the thread that writes them; recorder, what a trainer calls.
Imports no torch and asks no SQL.
"""
