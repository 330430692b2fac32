package main

import (
	"net"
	"sync/atomic"
	"time"
)

// addedDelay is what the network adds to each round trip.
const addedDelay = 500 * time.Microsecond

// network is a TCP proxy that stands for a network: it holds back what a client sends, once for each time
// that it asks the server anew, and counts these round trips. An answer in several packets is delayed once.
type network struct {
	listener net.Listener
	target   string
	trips    atomic.Int64
}

func newNetwork(target string) (*network, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	n := &network{listener: listener, target: target}
	go n.accept()
	return n, nil
}

func (n *network) address() string { return n.listener.Addr().String() }

// close takes no new connections; the others end with their clients.
func (n *network) close() error { return n.listener.Close() }

func (n *network) accept() {
	for {
		client, err := n.listener.Accept()
		if err != nil {
			return
		}
		go n.connect(client)
	}
}

func (n *network) connect(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", n.target)
	if err != nil {
		return
	}
	delay, err := newDelay(addedDelay)
	if err != nil {
		_ = server.Close()
		return
	}
	defer delay.close()

	var answered atomic.Bool // since the client has sent something
	answered.Store(true)
	answers := make(chan struct{})
	go func() {
		defer close(answers)
		pass(client, server, func() { answered.Store(true) })
		_ = client.Close()
	}()
	pass(server, client, func() {
		if answered.Swap(false) {
			n.trips.Add(1)
			delay.wait()
		}
	})
	_ = server.Close()
	<-answers
}

// pass copies until one end is closed. Each read is announced before it is passed on.
func pass(to, from net.Conn, each func()) {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return
		}
		each()
		if _, err := to.Write(buffer[:n]); err != nil {
			return
		}
	}
}
