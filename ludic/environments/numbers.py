"""Random whole numbers with a random number of digits, for the arithmetic environments."""

from random import Random

from ludic.errors import ConfigError


def check_max_digits(max_digits: int) -> None:
    """Raise ConfigError unless max_digits is a whole number from 1 to 100."""
    if not isinstance(max_digits, int) or not 1 <= max_digits <= 100:
        raise ConfigError(f"max_digits is {max_digits!r}, wanted a whole number from 1 to 100")


def random_number(random: Random, max_digits: int) -> int:
    """Return a number of at least 0; each number of digits up to max_digits is equally likely."""
    digits = random.randint(1, max_digits)
    return random.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
