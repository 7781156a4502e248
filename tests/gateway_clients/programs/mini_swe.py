"""mini-swe-agent with its own prompts and its environment of local commands; it has no streams."""

import os
from pathlib import Path

import minisweagent
import yaml
from common import MODEL, TASK, finish
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

config = yaml.safe_load((Path(minisweagent.__file__).parent / "config" / "mini.yaml").read_text())
kwargs = config["model"].pop("model_kwargs") | {"api_base": os.environ["OPENAI_BASE_URL"]}
del config["agent"]["mode"]  # asks a person
model = LitellmModel(
    model_name=f"openai/{MODEL}", model_kwargs=kwargs, cost_tracking="ignore_errors", **config["model"]
)
agent = DefaultAgent(model, LocalEnvironment(cwd=str(Path.cwd()), **config["environment"]), **config["agent"])
finish(agent.run(TASK)["submission"].strip())
