-- max_age: the rollout was written more than $max_age_s seconds before $now, by the worker's clock
epoch($now::timestamptz) - epoch(created_at) > $max_age_s
