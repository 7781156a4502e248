-- quarantine: broken files that were moved to quarantine/, where readers do not look
-- grain: one row per file | reads: quarantine/ of the root, and set_aside/, the folder's name in older versions
-- name: the file's former path; found_at: time when it was found
with notes as (
    select from_json(content, '{"name": "varchar", "reason": "varchar", "found_at": "timestamptz"}') as note
    from read_text(
        list_concat(files_of_$number('quarantine'), files_of_$number('old quarantine'))
    )
    where json_valid(content)
)
select unnest(note) from notes
