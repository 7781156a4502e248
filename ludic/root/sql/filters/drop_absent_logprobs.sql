-- drop_absent_logprobs: nobody kept the sampler's logprobs, so response_logprobs are zeros and there is no importance ratio
-- objectives that take a ratio drop these rows without this filter, as no_logprobs or text_capture
capture in ('ids', 'text')
