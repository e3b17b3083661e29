from tests.test_engine_faults import *
def test_x(target):
    asked = requests()
    engine = Engine(target, drafters(target)[1], max_rows=3)
    for r in asked: engine.add(r)
    while engine.has_work:
        outs = engine.step()
        print([(asked.index(o.request), len(o.tokens), o.accepted) for o in outs])
    assert 0
