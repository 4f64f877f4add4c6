import json
from contextlib import nullcontext
class P:
    def add_task(self,*a,**k): return 0
    def update(self,*a,**k): 
        pass
def progress_bar(visible): return nullcontext(P())
class Report:
    passed=True
    def __init__(self,args,modes,steps,size): self.modes=modes; self.checks=[]
    def show(self):
        import statistics as s
        for m in self.modes: print(m.name, "ms %.0f"%(1e3*s.median(m.seconds)), "saved %.1f"%(m.saved_bytes/1e6), "acc %.3f"%m.accuracy, " ".join("%.3f"%l for l in m.losses[:3]+m.losses[-3:]))
        f=self.modes[-1]; r=self.modes[-2]; q=self.modes[0]
        for a,b in ((f,r),(r,q)):
            d=[abs(x-y)/y for x,y in zip(a.losses,b.losses)]
            print(" rel", " ".join("%.1e"%x for x in d[:12]), "max %.2f maxabs %.2f"%(max(d),max(abs(x-y) for x,y in zip(a.losses,b.losses))))
            w=max(5,len(d)//10); ma=s.mean(a.losses[-w:]);mb=s.mean(b.losses[-w:]); print(" tail %.4f %.4f  acc %.3f %.3f"%(ma,mb,a.accuracy,b.accuracy), "mean %.4f %.4f"%(s.mean(a.losses),s.mean(b.losses)))
        for c in self.checks: print(c)
    def write(self,*a): pass
