"""Twenty prompts of all kinds: short, long, code, digits, other languages and scripts."""

PROMPTS: tuple[str, ...] = (
    "The capital of France is",
    "Hello",
    "1 + 1 =",
    "3.14159265358979 2718281828 0x1F 1,000,000",
    "Once upon a time, in a small village at the foot of a mountain, there lived",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    "SELECT name, COUNT(*) FROM users WHERE age > 30 GROUP BY",
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "La capitale de la France est",
    "Die Hauptstadt von Deutschland ist",
    "日本の首都は",
    "中国的首都是",
    "Столица России —",
    "عاصمة مصر هي",
    "😀 😃 😄 emoji: 👩‍👩‍👧‍👦 and é, ñ, ü",
    '{"name": "Alice", "age": 30, "city": "',
    "Question: What is the boiling point of water at sea level in degrees Celsius?\nAnswer:",
    "<p>A paragraph of <b>bold",
    "To be, or not to be, that is the question: " * 6,
    (
        "The history of computing begins long before electronic machines. Early devices such as the abacus helped merchants add sums; "
        "later, mechanical calculators by Pascal and Leibniz could multiply. In the nineteenth century Babbage designed the Analytical Engine, "
        "and Ada Lovelace wrote what many call the first program. The twentieth century brought relays, vacuum tubes and then transistors, which made"
    ),
)
