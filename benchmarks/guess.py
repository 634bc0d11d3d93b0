"""The guessing game of learning_environments.py, as a user writes it (``--env``): nothing is imported.

A number from 1 to 7 has to be found in three turns. Each wrong guess is answered "higher" or "lower".
Bisection always finds it.
"""

TURNS = 3


class Guess:
    """The game in plain text. Each turn must be a number; anything else loses."""

    def reset(self, number: int) -> None:
        self.number = number
        self.turns = 0

    def step(self, text: str) -> tuple[str, float, bool]:
        """A turn -> (observation, reward, whether the game is over)."""
        self.turns += 1
        if text not in map(str, range(1, 8)):
            return "lost", 0.0, True
        if int(text) == self.number:
            return "won", 1.0, True
        if self.turns == TURNS:
            return "lost", 0.0, True
        return "higher" if self.number > int(text) else "lower", 0.0, False


class GuessTool:
    """The same game by calls of a tool, as TRL's ``environment_factory`` takes it too."""

    def reset(self, number: int, **others: object) -> None:
        self._game = Guess()
        self._game.reset(number)
        self._reward = 0.0
        self._over = False

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: From 1 to 7.
        """
        if self._over:
            return "lost"
        observation, self._reward, self._over = self._game.step(str(number))
        return observation

    def get_reward(self) -> float:
        return self._reward
