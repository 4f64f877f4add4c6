// A page that is opened from a folder may start no Worker. The search, which runs in one, gets a hidden frame
// with a Worker's interface there: messages both ways, and importScripts.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const scope = this.frame.contentWindow;
      this.deliver = scope.postMessage.bind(scope);
      scope.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const add = (source) =>
        new Promise((resolve, reject) => {
          const script = scope.document.createElement("script");
          script.onload = resolve;
          script.onerror = reject;
          script.src = source;
          scope.document.body.append(script);
        });
      scope.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => add(source)), Promise.resolve());
      this.ready = add(new URL(url, document.baseURI));
    }
    postMessage(data) {
      this.ready.then(() => this.deliver(data, "*"));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
