# Codex: speaks responses alone, streamed. $1 is the folder of its program.
set -e
export CODEX_HOME="$HOME/codex"
mkdir -p "$CODEX_HOME"
cat > "$CODEX_HOME/config.toml" <<TOML
model = "$MODEL"
model_provider = "ludic"
check_for_update_on_startup = false
web_search = "disabled"
[analytics]
enabled = false
[feedback]
enabled = false
[otel]
exporter = "none"
[model_providers.ludic]
name = "ludic"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
TOML
printf '\nFINAL: '
"$1/codex" exec --skip-git-repo-check --ephemeral --dangerously-bypass-approvals-and-sandbox "$TASK" </dev/null
