-- newest_code: the code of the newest attempt, and of the newest life of each worker's slot
-- grain: one row per role, name and text | reads: code
-- NULL: sha256 of code without a source file; path of installed code; package of a user's file
with ranked as (
    select *, rank() over (partition by attempt_id is null, slot order by coalesce(attempt_id, life) desc) as place
    from code
)

select distinct role, name, sha256, path, package, imports
from ranked
where place = 1
order by all
