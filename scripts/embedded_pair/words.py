"""Word lists that the problem and chat generators draw from; all our own."""

NAMES = """Ada Ben Clara Dev Elif Farid Grace Hugo Ines Jonas Kira Leo Mina Noor Omar Petra Quinn Rosa
Sami Tara Umar Vera Wes Xenia Yusuf Zoe Amara Boris Celia Dario Esther Felix Greta Hana Igor Julia
Karim Lena Marco Nadia Otto Priya Ravi Selma Tomas Ursula Viktor Wanda Yara Zack Anton Bella Chen
Diego Edith Finn Gita Heidi Ivan Jade""".split()

ITEMS = """apples marbles stickers books pencils coins shells cards stamps beads cookies oranges
buttons balloons ribbons candles tickets plums bottles crayons photos badges pebbles muffins
lemons notebooks kites spoons keys lanterns peaches scarves mugs magnets puzzles seeds eggs
cupcakes flowers ropes hats bricks tiles maps postcards brushes""".split()

GOODS = """pen notebook sandwich ticket mug book lamp scarf puzzle candle plant basket hat kite
poster ball bowl brush cake map toy whistle ribbon bottle""".split()

PLACES = """garden attic park shed library drawer school market kitchen harbour garage forest
museum station yard cellar""".split()

CONTAINERS = "boxes bags baskets shelves jars trays drawers crates bowls rows".split()

ACTIVITIES = [
    ("reads", "pages", "read"), ("paints", "tiles", "paint"), ("walks", "miles", "walk"),
    ("plants", "seeds", "plant"), ("bakes", "rolls", "bake"), ("writes", "letters", "write"),
    ("folds", "shirts", "fold"), ("sells", "lamps", "sell"), ("packs", "parcels", "pack"),
    ("solves", "puzzles", "solve"), ("draws", "sketches", "draw"), ("washes", "cars", "wash"),
]

WORDS = """able acorn actor agent alarm album amber angle ankle apple apron arrow artist atlas autumn
bacon badge baker banana banjo barrel basil basket beach beard berry bishop blanket board bottle
branch bread brick bridge bronze brush bubble bucket butter button cabin cable cactus camel candle
canyon carbon carpet carrot castle cedar cellar chain chalk cherry circle citrus clock cloud clover
coast cobalt coffee comet copper coral cotton cousin crane crater cricket crystal curtain daisy
dancer desert dinner doctor dragon drawer eagle earth easel echo elbow ember engine falcon farmer
feather fence fiddle finger flame flint flower forest fossil fridge garden garlic gentle ginger
glacier globe glove grain granite grape guitar hammer harbor harvest hazel helmet hermit hollow
honey hotel island ivory jacket jelly jewel jungle kettle kitchen kitten ladder lagoon lantern
laurel lemon letter lilac linen lion lizard lotus magnet mango maple marble market meadow melon
metal mirror model monkey motor mountain museum needle nickel night novel oasis ocean olive onion
orange orbit otter oyster paddle palace panda paper parrot pasta pebble pencil pepper piano pillow
pilot planet plaza pocket poem pond potato prism puddle purple puzzle quartz queen quill rabbit
radio ranger raven ribbon river robin rocket saddle salad salmon sandal satin school shadow shell
shovel signal silver sketch soldier spider spiral spoon spring square stable station stone storm
summer sunset table tailor teapot temple thunder ticket tiger timber tomato tower train travel
trumpet tulip tunnel turtle valley vanilla velvet village violin wagon walnut water whale willow
window winter wizard wolf wonder yellow zebra""".split()
