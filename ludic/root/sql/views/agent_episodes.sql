-- agent_episodes: agents' episodes, each by the newest claim of a gateway
-- grain: one row per episode_id and attempt | reads: episode_claims
-- is_open: not sealed yet, as far as is stored
-- NULL: what is not known before the end, and of an episode that was not scored
select *, sealed_at is null as is_open
from episode_claims
qualify row_number() over (partition by episode_id, attempt order by number desc) = 1
