// Package testproxy is a TCP proxy that cuts connections at a chosen place, and takes
// a server away.
package testproxy

import (
	"bytes"
	"io"
	"net"
	"sync"
	"testing"
)

// Proxy stands between a client and a server.
type Proxy struct {
	listener net.Listener
	target   string

	mutex  sync.Mutex
	down   bool
	cut    *cut
	conns  map[net.Conn]struct{}
	closed bool
	wait   sync.WaitGroup
}

type cut struct {
	request []byte // the answer to what contains this is cut
	after   int    // so many bytes of the answer pass
	done    chan struct{}
}

// New starts a proxy to the address; it ends with the test.
func New(t testing.TB, target string) *Proxy {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{listener: listener, target: target, conns: map[net.Conn]struct{}{}}
	p.wait.Add(1)
	go p.accept()
	t.Cleanup(func() {
		p.mutex.Lock()
		p.closed = true
		p.mutex.Unlock()
		_ = listener.Close()
		p.closeConns()
		p.wait.Wait()
	})
	return p
}

// Address is where clients connect.
func (p *Proxy) Address() string { return p.listener.Addr().String() }

// Down cuts all connections and refuses new ones.
func (p *Proxy) Down() {
	p.mutex.Lock()
	p.down = true
	p.mutex.Unlock()
	p.closeConns()
}

// Up ends Down.
func (p *Proxy) Up() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.down = false
}

// CutAnswer cuts the connection on which the client next sends the text, after so many bytes of the
// answer. The channel is closed when that has happened.
func (p *Proxy) CutAnswer(request string, after int) <-chan struct{} {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.cut = &cut{request: []byte(request), after: after, done: make(chan struct{})}
	return p.cut.done
}

func (p *Proxy) accept() {
	defer p.wait.Done()
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.mutex.Lock()
		refuse := p.down || p.closed
		p.mutex.Unlock()
		if refuse {
			_ = client.Close()
			continue
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mutex.Lock()
		p.conns[client], p.conns[server] = struct{}{}, struct{}{}
		p.mutex.Unlock()
		p.wait.Add(1)
		go p.serve(client, server)
	}
}

func (p *Proxy) serve(client, server net.Conn) {
	defer p.wait.Done()
	var armed *cut // for this connection
	var mutex sync.Mutex
	var group sync.WaitGroup
	group.Add(2)
	go func() {
		defer group.Done()
		defer server.Close()
		p.copy(server, client, func(data []byte) []byte {
			p.mutex.Lock()
			defer p.mutex.Unlock()
			if p.cut != nil && bytes.Contains(data, p.cut.request) {
				mutex.Lock()
				armed, p.cut = p.cut, nil
				mutex.Unlock()
			}
			return data
		})
	}()
	go func() {
		defer group.Done()
		defer client.Close()
		p.copy(client, server, func(data []byte) []byte {
			mutex.Lock()
			defer mutex.Unlock()
			if armed == nil {
				return data
			}
			if len(data) > armed.after {
				data = data[:armed.after]
				close(armed.done)
				armed = &cut{done: make(chan struct{})}
				_ = server.Close()
				return data
			}
			armed.after -= len(data)
			return data
		})
	}()
	group.Wait()
	p.mutex.Lock()
	defer p.mutex.Unlock()
	delete(p.conns, client)
	delete(p.conns, server)
}

func (p *Proxy) copy(to io.Writer, from io.Reader, filter func([]byte) []byte) {
	buffer := make([]byte, 64*1024)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			if _, err := to.Write(filter(buffer[:n])); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (p *Proxy) closeConns() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for conn := range p.conns {
		_ = conn.Close()
	}
}
