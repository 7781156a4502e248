-- spread_over_tokens: a value for each token of a response: the tokens of a turn have that of the turn, all others `base`
-- starts, ends: bounds of the turns in the response, in order; of_turns: a value for each of them
-- NULL: if one of the lists is NULL
create or replace macro spread_over_tokens(starts, ends, of_turns, base, response_length) as list_resize(
    flatten([
        list_resize(
            list_resize([]::float[], turn_start - coalesce(ends[turn - 1], 0), base),
            ends[turn] - coalesce(ends[turn - 1], 0),
            of_turns[turn]
        )
        for turn_start, turn in starts
    ]),
    response_length,
    base
)
