-- drop_parse_errors: a completion could not be parsed
parse_error
