-- evaluations: settings and code with which `ludic eval` samples and scores
-- grain: one row per evaluation | reads: evaluations/ of the root
-- settings: of the environment, of sampling and of the agent, as JSON text; code: the code that scored, as JSON text
select $columns
from $stored
