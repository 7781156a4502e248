-- labels: marks and notes that people gave to rollouts; of one author and name, the newest counts
-- grain: one row per rollout_id, name and author, without those that were withdrawn | reads: all_labels
-- NULL: value if the mark is a text, text if it is a number, both if there is only a note
from (
    select *
    from all_labels
    qualify row_number() over (
        partition by rollout_id, name, author order by created_at desc, value, text, note
    ) = 1
)
where value is not null or text is not null or note is not null
