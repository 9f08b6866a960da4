"""Operations that stand for several basic ones in a forward or a backward."""
