-- drop_truncated: a limit of the environment or the protocol ended the episode (max_steps, env, max_seq_len,
-- context_length); for completions that reached max_tokens, see drop_incomplete_completions
truncated
