-- drop_absent_logprobs: imported from a program that did not store the sampler's logprobs, so that
-- response_logprobs are zeros and no importance ratio can be taken
metadata['logprobs'] = 'absent'
