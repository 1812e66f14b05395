"""Products that know no norm: a, b, c."""
