"""Operations: what people do with a run. Each is one function.

Its signature and docstring give the method of `ludic.Run`, the flags of the command, their help and docs/api.md. A
parameter with a type that a flag can give is a flag; `run` is an opened run, or ROOT. The function returns a Result
(ludic.results), which prints as text, in a notebook, and with --json. To add an operation, write the function, and name
it in COMMANDS (ludic.cli.commands), in `Run`, or in both.

The modules import nothing slow, since `ludic --help` reads their docstrings; a function imports what it needs.
"""
