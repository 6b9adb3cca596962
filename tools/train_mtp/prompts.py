"""What the base is asked. Nothing here is from elsewhere.

Openings, templates and topics begin the conversations that are trained on; the held-out questions measure, and begin none of them.
"""

SYSTEM = "<|im_start|>system\n{}<|im_end|>\n"
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
USER = "<|im_start|>user\n"
# Ends a user's turn and begins the answer.
ANSWER = "<|im_end|>\n<|im_start|>assistant\n"

# Other system prompts, for a few conversations.
OTHER_SYSTEMS = [
    "You are a helpful assistant.", "You are a friendly tutor. Keep your answers short.",
    "You answer questions briefly and accurately.", "You are an expert programmer.", "You are a creative writer.",
    "You are a careful editor who rewrites text clearly.",
]

# The first 32 also measure while training goes on.
HELD_OUT = [
    "What is gravity?", "Write a short story about a lighthouse keeper.", "How do I bake bread at home?",
    "Explain photosynthesis to a child.", "Give me five tips for better sleep.",
    "Write a Python function that reverses a string.", "Why is the sky blue?",
    "Summarize the plot of Romeo and Juliet.", "What are the benefits of exercise?", "Describe the water cycle.",
    "How does a car engine work?", "Write an email asking for a day off.", "What is machine learning?",
    "List three famous scientists and what they discovered.", "How can I save money each month?",
    "Explain supply and demand.", "Write a poem about autumn leaves.", "What causes earthquakes?",
    "Plan a weekend trip to the mountains.", "How do vaccines work?",
    "What is the capital of France and what is it known for?", "Write a haiku about the sea.",
    "Explain recursion with an example.", "Who was Marie Curie?", "How do I remove a coffee stain?",
    "What is the difference between weather and climate?", "Suggest a name for a small bakery.",
    "Describe a healthy breakfast.", "What is a black hole?", "Write a product description for a wooden chair.",
    "How do bees make honey?", "What should I see in Rome?", "What is the speed of light?",
    "How do I change a flat tire?", "Write a dialogue between a cat and a dog.", "Why do leaves change color?",
    "Tell me about the Great Wall of China.", "What are prime numbers?", "Give me a recipe for tomato soup.",
    "How does the stock market work?", "Write a cover letter for a librarian job.", "What is the meaning of empathy?",
    "Explain how a refrigerator works.", "Name four planets and describe them.", "How can I learn to play the guitar?",
    "What is a database index?", "Translate 'good morning' into Spanish.",
    "Write a SQL query that counts users by country.", "Who painted the Mona Lisa?", "What happens when water boils?",
    "Describe a rainy day in a big city.", "How do I prepare for a job interview?", "What is inflation?",
    "Write a birthday message for my grandmother.", "Explain the rules of chess.", "What is the largest ocean?",
    "How do airplanes fly?", "Give me three ideas for a science fair project.", "Why is biodiversity important?",
    "Write a function in JavaScript that adds two numbers.", "What is the theory of evolution?",
    "Summarize the story of Cinderella.", "How do I take care of a cactus?", "What makes a good leader?",
]

# First words of a user's turn, which the base writes to its end; none at all weighs most.
OPENINGS = [
    "", "", "", "", "", "", "What", "What is", "What are", "What is the difference between", "What does", "How",
    "How do I", "How can I", "How does", "How to", "How many", "Why", "Why is", "Why do", "Write", "Write a short",
    "Write a story about", "Write a poem about", "Write an email", "Write a Python function", "Write a program that",
    "Write a function", "Write a paragraph about", "Write an essay", "Explain", "Explain the", "Explain how", "Give me",
    "Give me a list of", "Give an example of", "Can you", "Can you explain", "Can you help me", "Could you", "I",
    "I want to", "I need", "I am", "I'm", "My", "Summarize", "Summarize the following", "List", "List the", "Create",
    "Create a", "Describe", "Describe the", "Help me", "Please", "Tell me", "Tell me about", "Is", "Is it", "Are", "Do",
    "Does", "Should I", "Who", "Who was", "When", "When did", "Where", "Where is", "Which", "Translate", "Make", "The",
    "A", "Rewrite", "Rewrite this", "Edit", "In", "If", "Compare", "Suggest", "Identify", "Classify", "Generate",
    "Design", "Find", "Calculate", "Solve", "Convert", "Name", "Provide", "Discuss", "Analyze", "Define", "Outline",
    "Plan", "Imagine", "You are", "Let's", "Here is", "Given", "Using", "Hi", "Hello", "Hey", "Thanks", "Complete",
    "Paraphrase", "Develop", "Recommend", "Who is", "What was", "What would", "What's", "What can", "For", "On", "This",
    "There", "We", "Our", "Does the", "Can", "Have", "Implement", "Fix", "Extract",
]

# First words of a text that is no conversation.
PLAIN = [
    "The", "In", "Once upon a time", "The history of", "A", "It was", "There are many", "When", "This article", "Today",
    "def ", "import ", "# ", "The first", "She", "He", "We", "If you", "Most people", "Here is a",
]

# Whole user turns about one topic or two.
TEMPLATES = [
    "What is {}?", "Explain {}.", "Tell me about {}.", "How does {} work?", "Why is {} important?",
    "Write a short story about {}.", "Write a poem about {}.", "Give me three facts about {}.",
    "Describe {} in one paragraph.", "What are the advantages and disadvantages of {}?",
    "Can you explain {} in simple terms?", "Explain {} to a five year old.", "List five things I should know about {}.",
    "Write an essay about {}.", "Who invented {}?", "Summarize the history of {}.", "How can I learn more about {}?",
    "Give me an example of {}.", "What is the difference between {} and {}?", "Write a dialogue about {}.",
    "I want to know more about {}", "what is {}", "Compare {} and {}.", "Write a blog post introduction about {}.",
    "Create a quiz question about {} and answer it.", "What are common mistakes people make with {}?",
    "How would you teach {} to a beginner?", "Write a letter to a friend about {}.",
    "Give me tips for getting started with {}.", "Is {} a good idea?", "Suggest a title for an article about {}.",
    "Write a Python program about {}.", "Why do people like {}?", "What will {} look like in the future?",
    "Write a limerick about {}.", "Describe {}.", "Define {}.", "Write two sentences about {}.",
    "Make a list of words related to {}.", "How did {} change the world?",
]

TOPICS = """
    volcanoes; the moon; electricity; the internet; democracy; jazz; the Roman Empire; dinosaurs; chocolate; coffee;
    tea; bicycles; trains; the human heart; the brain; memory; dreams; friendship; honesty; courage; patience; time
    management; public speaking; meditation; yoga; running; swimming; football; tennis; basketball; gardening;
    roses; oak trees; rain forests; deserts; rivers; glaciers; coral reefs; whales; elephants; tigers; penguins;
    owls; dogs; cats; horses; spiders; butterflies; robots; computers; neural networks; artificial intelligence;
    quantum mechanics; relativity; atoms; molecules; DNA; bacteria; viruses; antibiotics; nutrition; vitamins;
    sugar; salt; water; fire; wind power; solar panels; nuclear energy; batteries; cars; bridges; skyscrapers;
    castles; pyramids; museums; libraries; books; poetry; novels; movies; theatre; photography; painting; sculpture;
    music; the piano; the violin; opera; dance; fashion; cooking; pasta; pizza; rice; cheese; apples; bananas;
    breakfast cereal; soup; salad; grilling; budgeting; taxes; insurance; investing; banks; credit cards; startups;
    marketing; advertising; customer service; teamwork; leadership; remote work; job hunting; resumes; negotiation;
    email; social media; online privacy; passwords; encryption; blockchain; Python; Java; HTML; Linux; Git;
    databases; linked lists; binary search; sorting algorithms; hash tables; recursion in nature; loops; variables;
    functions; fractions; algebra; geometry; calculus; probability; statistics; the number pi; triangles; the
    Pythagorean theorem; World War II; the Cold War; the French Revolution; ancient Greece; ancient Egypt; the
    Vikings; the Silk Road; the Industrial Revolution; the printing press; the telephone; Albert Einstein; Isaac
    Newton; Leonardo da Vinci; William Shakespeare; Mozart; Beethoven; Abraham Lincoln; Nelson Mandela; Japan;
    Brazil; India; Canada; Australia; Germany; Italy; Spain; Mexico; Kenya; Norway; New York; London; Tokyo; Paris
    in spring; Madrid; Berlin; Cairo; the Amazon; the Alps; the Pacific islands; the Arctic; Mars; Jupiter; stars;
    galaxies; comets; space travel; satellites; telescopes; magnets; sound; light; color; temperature; clouds;
    storms; hurricanes; snow; rainbows; recycling; climate change; pollution; plastic; endangered species; farming;
    bees and flowers; soil; forests; oceans; tides; sharks; dolphins; snakes; frogs; birds; feathers; teeth; bones;
    muscles; skin; eyes; stress; happiness; anger; fear; love; parenting; schools; homework; exams; languages;
    Spanish grammar; Chinese characters; spelling; punctuation; essays; speeches; jokes; riddles; board games; video
    games; puzzles; magic tricks; holidays; birthdays; weddings; gifts; travel; hotels; packing a suitcase; camping;
    hiking; fishing; sailing; airports; maps; compasses; clocks; calendars; money; gold; diamonds; glass; paper;
    wood; steel; concrete; clay; wool; cotton; shoes; hats; umbrellas; furniture; lamps; kitchens; cleaning; laundry
"""
TOPICS = [" ".join(topic.split()) for topic in TOPICS.split(";")]
