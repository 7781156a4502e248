# opencode: reads a provider from opencode.json; always streams. $1 is the folder of its program.
set -e
export OPENCODE_DISABLE_AUTOUPDATE=1 OPENCODE_DISABLE_MODELS_FETCH=1 OPENCODE_DISABLE_LSP_DOWNLOAD=1
export OPENCODE_DISABLE_DEFAULT_PLUGINS=1 OPENCODE_DISABLE_SHARE=1
mkdir -p "$HOME/opencode"
export OPENCODE_CONFIG="$HOME/opencode/opencode.json"
cat > "$OPENCODE_CONFIG" <<JSON
{"share": "disabled", "autoupdate": false, "permission": "allow", "small_model": "ludic/$MODEL",
 "provider": {"ludic": {"npm": "@ai-sdk/openai-compatible", "name": "ludic",
  "options": {"baseURL": "$OPENAI_BASE_URL", "apiKey": "$OPENAI_API_KEY"},
  "models": {"$MODEL": {"name": "$MODEL", "tool_call": true, "limit": {"context": 200000, "output": 4000}}}}}}
JSON
printf '\nFINAL: '
"$1/opencode" run --pure --model "ludic/$MODEL" "$TASK" </dev/null
