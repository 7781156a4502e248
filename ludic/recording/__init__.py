"""Record the rollouts and steps of somebody else's trainer in a root: `ludic.record`.

rows fills in the columns that a row lacks; losses counts what the store did not take; life writes one recorder's files;
recorder is what a trainer calls. Imports no torch and asks no SQL.
"""
