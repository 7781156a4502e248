-- drop_absent_logprobs: the rollout was imported from a program that did not store the sampler's logprobs, so
-- response_logprobs are zeros and there is no importance ratio
metadata['logprobs'] = 'absent'
