import sys
sys.argv=["x"]
exec(open("/tmp/trymods.py").read())
def test_x(tiny_path, folder, tmp_path):
    e=end(start(sys.executable,"-c",code,str(ROOT/"train/run.py"),*SMALL_EAGLE3,f"target.path={tiny_path}",f"data.path={folder}","output_dir=out","trainer.max_steps=3","evaluate.eval_steps=0",cwd=tmp_path))
    print(e.out,e.err[-6000:])
