"""Coding agents that run here as they are: their commands, variables and files, without updates and telemetry.

One value a harness, which `--agent NAME` takes (ludic.settings.kinds). Each must be installed, and found by PATH. It is
told to run the commands that the model writes without asking, in the folder of the episode, and as this user.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


def _no_files(model: str, base_url: str) -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """How a harness is started for an episode."""

    words: tuple[str, ...]
    """Its command, with the placeholders of ludic.rollouts.commands."""
    reads_prompt: bool = True
    """Whether the prompt is its standard input, which has no limit of length and is never read as options."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Its environment variables; $HOME is the home of the episode."""
    files: Callable[[str, str], Mapping[str, str]] = _no_files
    """Returns the texts of its files below the home, by name, from the model's name and the base URL."""


def _codex_files(model: str, base_url: str) -> Mapping[str, str]:
    # Texts of JSON are texts of TOML, too.
    text = f"""\
model = {json.dumps(model)}
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
base_url = {json.dumps(base_url)}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
    return {".codex/config.toml": text}


def _opencode_files(model: str, base_url: str) -> Mapping[str, str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "ludic",
        "options": {"baseURL": base_url, "apiKey": "{env:OPENAI_API_KEY}"},
        "models": {model: {"name": model, "tool_call": True, "limit": {"context": 200_000, "output": 4_000}}},
    }
    settings = {
        "share": "disabled",
        "autoupdate": False,
        "permission": "allow",
        "small_model": f"ludic/{model}",
        "provider": {"ludic": provider},
    }
    return {".config/opencode/opencode.json": json.dumps(settings)}


def _pi_files(model: str, base_url: str) -> Mapping[str, str]:
    provider = {
        "baseUrl": base_url,
        "api": "openai-completions",
        "apiKey": "OPENAI_API_KEY",  # the name of the variable
        "models": [{"id": model}],
    }
    return {".pi/agent/models.json": json.dumps({"providers": {"ludic": provider}})}


CLAUDE = Preset(
    words=("claude", "--print", "--dangerously-skip-permissions", "--model", "{model}"),
    variables={
        "CLAUDE_CONFIG_DIR": "$HOME/.claude",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
    },
)
CODEX = Preset(
    words=(
        *("codex", "exec", "--skip-git-repo-check", "--ephemeral", "--dangerously-bypass-approvals-and-sandbox"),
        *("--output-last-message", "{answer}", "-"),
    ),
    variables={"CODEX_HOME": "$HOME/.codex"},
    files=_codex_files,
)
MINI = Preset(
    words=(
        *("mini", "--yolo", "--exit-immediately", "--cost-limit", "0", "--model", "openai/{model}"),
        *("--config", "mini.yaml", "--config", "model.cost_tracking=ignore_errors"),
        *("--config", "model.model_kwargs.api_base={base_url}", "--task", "{prompt}"),
    ),
    reads_prompt=False,
    variables={"MSWEA_CONFIGURED": "true", "MSWEA_SILENT_STARTUP": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
)
OPENCODE = Preset(
    words=("opencode", "run", "--pure", "--model", "ludic/{model}"),
    variables={
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_SHARE": "1",
    },
    files=_opencode_files,
)
PI = Preset(
    words=("pi", "--print", "--no-session", "--provider", "ludic", "--model", "{model}"),
    variables={"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
    files=_pi_files,
)
