"""Run tools that a model calls: functions, a calculator, a Python interpreter and MCP servers; parse tool calls."""
