-- drop_truncated: a limit of the environment or the protocol ended the episode (max_steps, env, max_seq_len,
-- context_length, time_limit, or budget of delegated tasks); for completions that reached max_tokens, see
-- drop_incomplete_completions
truncated
