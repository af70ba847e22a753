"""The finite field GF(q), for any prime power q: what Slim Fly's switches are numbered with.

    GF(4) = GF(2)[x] / (x^2 + x + 1)         an element is a polynomial over GF(p), written as a number in base p
      0      0                                 0, 1, x, x + 1  =  00, 01, 10, 11  =  0, 1, 2, 3
      x^0    1     = 1
      x^1    x     = 2                       x is primitive: its powers are all elements but 0,
      x^2    x + 1 = 3                       so a product is a sum of exponents

q = p is counting modulo p; q = p^k is not counting modulo q, where p divides 0 and nothing has an inverse (a Slim Fly
made so has a diameter above 2). The polynomial is the first of degree k of which x is primitive; one always exists.

Source: R. Lidl and H. Niederreiter, "Finite Fields", 2nd edition, 1997, chapters 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from samestep.errors import UsageError

__all__: list[str] = []

Digits = tuple[int, ...]  # coefficients, the constant first


@dataclass(frozen=True)
class Field:
    """GF(q), by tables of q x q.

    Attributes:
        q: how many elements there are: the numbers 0 to q - 1.
        powers: of the primitive element, from its 0th to its (q - 2)nd.
        sums: `sums[a][b]`.
        negatives: `negatives[a]` added to a is 0.
        products: `products[a][b]`.
    """

    q: int
    powers: tuple[int, ...]
    sums: tuple[tuple[int, ...], ...]
    negatives: tuple[int, ...]
    products: tuple[tuple[int, ...], ...]

    def inverse(self, element: int) -> int:
        """Returns what `element` is to be multiplied with to get 1.

        Raises:
            ZeroDivisionError: it is 0.
        """
        if element == 0:
            raise ZeroDivisionError("0 has no inverse in a field")
        return self.powers[-self.powers.index(element) % (self.q - 1)]

    def difference(self, one: int, other: int) -> int:
        """Returns `one` - `other`."""
        return self.sums[one][self.negatives[other]]


def field(q: int) -> Field:
    """Returns GF(q).

    >>> field(4).powers, field(9).sums[4][5]
    ((1, 2, 3), 6)

    Raises:
        UsageError: q is not a prime power.
    """
    factors = prime_power(q)
    if factors is None:
        raise UsageError(f"there is no field of {q} elements: give a prime power, such as {near(q)}")
    prime, degree = factors
    digits = [_digits(number, prime, degree) for number in range(q)]
    powers = next(powers for lower in digits if len(powers := _powers(lower, prime)) == q - 1)
    numbers = {digits[element]: element for element in range(q)}
    exponent = {numbers[power]: at for at, power in enumerate(powers)}
    ordered = tuple(numbers[power] for power in powers)

    def times(one: int, other: int) -> int:
        return ordered[(exponent[one] + exponent[other]) % (q - 1)] if one and other else 0

    def plus(one: int, other: int) -> int:
        return numbers[tuple((a + b) % prime for a, b in zip(digits[one], digits[other], strict=True))]

    return Field(
        q,
        ordered,
        tuple(tuple(plus(one, other) for other in range(q)) for one in range(q)),
        tuple(numbers[tuple(-digit % prime for digit in digits[one])] for one in range(q)),
        tuple(tuple(times(one, other) for other in range(q)) for one in range(q)),
    )


def prime_power(q: int) -> tuple[int, int] | None:
    """Returns p and k where q = p^k, or None where q is no prime power.

    >>> prime_power(27), prime_power(12), prime_power(1)
    ((3, 3), None, None)
    """
    prime = next((factor for factor in range(2, int(q**0.5) + 1) if q % factor == 0), q) if q > 1 else 0
    degree = 0
    while prime and q % prime == 0:
        q, degree = q // prime, degree + 1
    return (prime, degree) if degree and q == 1 else None


def near(q: int, least: int = 2) -> str:
    """Returns the prime powers next to q, from `least` on, in words.

    >>> near(12), near(1)
    ('11 or 13', '2')
    """
    below = next((each for each in range(q - 1, least - 1, -1) if prime_power(each)), None)
    above = next(each for each in range(max(q + 1, least), 2 * max(q, least) + 2) if prime_power(each))
    return f"{above}" if below is None else f"{below} or {above}"


def _digits(number: int, base: int, count: int) -> Digits:
    return tuple(number // base**place % base for place in range(count))


def _powers(lower: Digits, prime: int) -> list[Digits]:
    """1, x, x^2, ... until one comes again or is 0, modulo the polynomial x^k + `lower`."""
    power: Digits = (1, *[0] * (len(lower) - 1))
    seen: dict[Digits, None] = {}
    while any(power) and power not in seen:
        seen[power] = None
        carry = power[-1]  # x^k is -lower
        power = tuple((a - carry * b) % prime for a, b in zip((0, *power[:-1]), lower, strict=True))
    return list(seen)
