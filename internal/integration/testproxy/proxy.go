// Package testproxy is a TCP proxy that is a bad network: it cuts connections at a chosen place, loses what
// goes one way, delays, and takes a server away.
package testproxy

import (
	"bytes"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// Proxy stands between clients and a server. All its methods may be called by many goroutines.
type Proxy struct {
	listener net.Listener
	wait     sync.WaitGroup

	mutex  sync.Mutex
	target string // of new connections
	closed bool
	down   bool
	delay  time.Duration
	stall  [2]chan struct{} // by direction: closed when data flows again; nil: it does
	cut    *cut
	conns  map[net.Conn]struct{}
}

// Direction is a way through the proxy.
type Direction int

// The directions.
const (
	ToServer Direction = iota
	ToClient
)

type cut struct {
	request []byte // the answer to what contains this, in any case of letters, is cut
	after   int    // so many bytes of the answer pass
	done    chan struct{}
}

// New starts a proxy to the address; it ends with the test.
func New(t testing.TB, target string) *Proxy {
	t.Helper()
	p, err := Start(target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// Start starts a proxy to the address.
func Start(target string) (*Proxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &Proxy{listener: listener, target: target, conns: map[net.Conn]struct{}{}}
	p.wait.Add(1)
	go p.accept()
	return p, nil
}

// Close cuts all connections and ends the proxy.
func (p *Proxy) Close() {
	p.mutex.Lock()
	p.closed = true
	p.mutex.Unlock()
	_ = p.listener.Close()
	p.Cut()
	p.wait.Wait()
}

// Address is where clients connect.
func (p *Proxy) Address() string { return p.listener.Addr().String() }

// Lead leads new connections to another server, as a DNS name does after a failover. Those that are open stay.
func (p *Proxy) Lead(target string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.target = target
}

// Down cuts all connections and refuses new ones.
func (p *Proxy) Down() {
	p.mutex.Lock()
	p.down = true
	p.mutex.Unlock()
	p.Cut()
}

// Up ends Down.
func (p *Proxy) Up() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.down = false
}

// Delay holds back what clients send for so long; zero ends it.
func (p *Proxy) Delay(d time.Duration) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.delay = d
}

// Stall holds back all that goes one way, on every connection, until Cut.
func (p *Proxy) Stall(direction Direction) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.stall[direction] == nil {
		p.stall[direction] = make(chan struct{})
	}
}

// CutAnswer cuts the connection on which a client next sends the text, after so many bytes of the answer.
// The channel is closed when that has happened.
func (p *Proxy) CutAnswer(request string, after int) <-chan struct{} {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.cut = &cut{request: []byte(request), after: after, done: make(chan struct{})}
	return p.cut.done
}

// Cut cuts all connections. What was held back is lost, and new connections work.
func (p *Proxy) Cut() {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for conn := range p.conns {
		_ = conn.Close()
	}
	for direction, stall := range p.stall {
		if stall != nil {
			close(stall)
			p.stall[direction] = nil
		}
	}
}

func (p *Proxy) accept() {
	defer p.wait.Done()
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.mutex.Lock()
		target := p.target
		p.mutex.Unlock()
		server, err := net.Dial("tcp", target)
		if err != nil {
			_ = client.Close()
			continue
		}
		p.mutex.Lock()
		refuse := p.down || p.closed
		if !refuse {
			p.conns[client], p.conns[server] = struct{}{}, struct{}{}
			p.wait.Add(1)
		}
		p.mutex.Unlock()
		if refuse {
			_, _ = client.Close(), server.Close()
			continue
		}
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
		p.copy(ToServer, server, client, func(data []byte) []byte {
			p.mutex.Lock()
			defer p.mutex.Unlock()
			if p.cut != nil && bytes.Contains(bytes.ToUpper(data), bytes.ToUpper(p.cut.request)) {
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
		p.copy(ToClient, client, server, func(data []byte) []byte {
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

func (p *Proxy) copy(direction Direction, to io.Writer, from io.Reader, filter func([]byte) []byte) {
	buffer := make([]byte, 64*1024)
	for {
		n, err := from.Read(buffer)
		if n > 0 {
			p.hold(direction)
			if _, err := to.Write(filter(buffer[:n])); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

func (p *Proxy) hold(direction Direction) {
	p.mutex.Lock()
	stall, delay := p.stall[direction], p.delay
	p.mutex.Unlock()
	if direction == ToServer && delay > 0 {
		time.Sleep(delay)
	}
	if stall != nil {
		<-stall
	}
}
