"""The base of `Run` with a method for each operation whose first parameter is `run`.

Type checkers and editors read methods.pyi, which `make format` writes.
"""

from ludic.app.operations.operation import Methods as Methods
