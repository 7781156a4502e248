-- text_of_code: the text of a user's file, stored as $sha256 under $path
-- grain: at most one row | reads: code
select any_value(text) as text, string_agg(distinct name, ', ' order by name) as names
from code
where sha256 = $sha256 and path = $path and text is not null
having count(*) > 0
