"""MetaWorld's 50 tasks in words, and its suites of 10, 25 and 50.

Nothing is imported: the process that runs MetaWorld knows these too.
"""

from __future__ import annotations

INSTRUCTIONS = {
    "assembly-v3": "put the ring on the peg",
    "basketball-v3": "drop the ball through the hoop",
    "bin-picking-v3": "move the block to the other bin",
    "box-close-v3": "put the lid on the box",
    "button-press-topdown-v3": "press the button from above",
    "button-press-topdown-wall-v3": "press the button behind the wall from above",
    "button-press-v3": "press the button from the front",
    "button-press-wall-v3": "reach over the wall and press the button",
    "coffee-button-v3": "press the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "lift the ring off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-close-v3": "turn the faucet off",
    "faucet-open-v3": "turn the faucet on",
    "hammer-v3": "drive the nail in with the hammer",
    "hand-insert-v3": "put the hand with the block into the hole",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "push the peg into the hole of the box",
    "peg-unplug-side-v3": "pull the peg out of the box",
    "pick-out-of-hole-v3": "lift the puck out of the hole",
    "pick-place-v3": "pick up the puck and carry it to the goal",
    "pick-place-wall-v3": "carry the puck over the wall to the goal",
    "plate-slide-back-side-v3": "slide the plate sideways out of the cabinet",
    "plate-slide-back-v3": "slide the plate out of the cabinet",
    "plate-slide-side-v3": "slide the plate sideways into the cabinet",
    "plate-slide-v3": "slide the plate into the cabinet",
    "push-back-v3": "pull the block back to the goal",
    "push-v3": "push the puck to the goal",
    "push-wall-v3": "push the block around the wall to the goal",
    "reach-v3": "move the hand to the goal",
    "reach-wall-v3": "move the hand over the wall to the goal",
    "shelf-place-v3": "put the block on the shelf",
    "soccer-v3": "push the ball into the soccer goal",
    "stick-pull-v3": "pull the thermos with the stick",
    "stick-push-v3": "push the thermos with the stick",
    "sweep-into-v3": "sweep the block into the hole",
    "sweep-v3": "sweep the block off the table",
    "window-close-v3": "close the window",
    "window-open-v3": "open the window",
}

MT10 = (
    "reach-v3",
    "push-v3",
    "pick-place-v3",
    "door-open-v3",
    "drawer-open-v3",
    "drawer-close-v3",
    "button-press-topdown-v3",
    "peg-insert-side-v3",
    "window-open-v3",
    "window-close-v3",
)
_FURTHER_15 = (
    "coffee-pull-v3",
    "pick-out-of-hole-v3",
    "disassemble-v3",
    "pick-place-wall-v3",
    "basketball-v3",
    "stick-pull-v3",
    "button-press-wall-v3",
    "faucet-open-v3",
    "door-lock-v3",
    "lever-pull-v3",
    "sweep-into-v3",
    "faucet-close-v3",
    "coffee-button-v3",
    "button-press-topdown-wall-v3",
    "dial-turn-v3",
)
SUITES = {"mt10": MT10, "mt25": (*MT10, *_FURTHER_15), "mt50": tuple(INSTRUCTIONS)}


def tasks_of(name: str) -> tuple[str, ...]:
    """Returns the tasks of a suite, or the one task of that name."""
    return SUITES.get(name, (name,))
