# Claude Code: speaks Anthropic's messages, always streamed. $1 is the folder of its program, a native binary.
set -e
export CLAUDE_CONFIG_DIR="$HOME/claude" CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 DISABLE_AUTOUPDATER=1
export DISABLE_TELEMETRY=1 DISABLE_ERROR_REPORTING=1
mkdir -p "$CLAUDE_CONFIG_DIR"
printf '\nFINAL: '
"$1/claude" --print --model "$MODEL" --allowedTools Bash -- "$TASK" </dev/null
