"""The environment of the demo `--env demo-calculator`: a tool that computes products, which the model cannot do itself."""


class Calculator:
    """A TRL environment: its public method is a tool; the last answer is compared with the ground truth by a verifier."""

    def calculate(self, expression: str) -> str:
        """Computes a product.

        Args:
            expression: Two numbers with * between them.
        """
        a, b = expression.split("*")
        return str(int(a) * int(b))
