# pi-coding-agent: reads a provider from models.json, in any of three dialects; always streams. $1 is the folder of its
# program.
set -e
export PI_OFFLINE=1 PI_TELEMETRY=0 PI_CODING_AGENT_DIR="$HOME/pi"
url="$OPENAI_BASE_URL"
[ "$API" = anthropic-messages ] && url="$ANTHROPIC_BASE_URL"
mkdir -p "$PI_CODING_AGENT_DIR"
cat > "$PI_CODING_AGENT_DIR/models.json" <<JSON
{"providers": {"ludic": {"baseUrl": "$url", "api": "${API:-openai-completions}", "apiKey": "OPENAI_API_KEY",
  "models": [{"id": "$MODEL"}]}}}
JSON
printf '\nFINAL: '
"$1/pi" --print --no-session --provider ludic --model "$MODEL" "$TASK" </dev/null
