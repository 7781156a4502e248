-- set_aside: broken files that were moved to set_aside/, where readers do not look
-- grain: one row per file | reads: set_aside/ of the root
-- name: the file's former path; found_at: time when it was found
with notes as (
    select from_json(content, '{"name": "varchar", "reason": "varchar", "found_at": "timestamptz"}') as note
    from read_text($root || '/set_aside/**/*.json')
    where json_valid(content)
)
select unnest(note) from notes
