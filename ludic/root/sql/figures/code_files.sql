-- code_files: the code that decided rewards and advantages, newest attempts and lives last
-- grain: one row per role, name and sha256 | reads: code
-- NULL: path of installed code, package of a user's file
select
    role,
    name,
    path,
    package,
    sha256,
    count(attempt_id) as num_attempts,
    count(*) filter (attempt_id is null) as num_lives,
    min(attempt_id) as first_attempt,
    max(attempt_id) as last_attempt,
    max(length(text)) as num_characters
from code
group by role, name, path, package, sha256
order by role, name, first_attempt, sha256
