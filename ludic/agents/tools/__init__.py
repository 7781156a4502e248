"""Tools that a model calls: functions, a calculator, a Python interpreter, MCP servers; and formats of calls."""
