"""Operations whose operands are spread over ranks."""
