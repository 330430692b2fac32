package main

import (
	"context"
	"sync"

	"github.com/ThreeDotsLabs/watermill/message"
)

// counts is what the router's handlers were given and did.
type counts struct {
	mutex     sync.Mutex
	changed   chan struct{} // closed at the next change
	byHandler map[string]*handlerCounts
}

type handlerCounts struct{ deliveries, acknowledged, runs, failed int }

func newCounts() *counts {
	return &counts{changed: make(chan struct{}), byHandler: make(map[string]*handlerCounts)}
}

// Deliveries is the outermost middleware.
func (c *counts) Deliveries(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		c.change(msg, func(counts *handlerCounts) { counts.deliveries++ })
		produced, err := h(msg)
		if err == nil { // the router acknowledges
			c.change(msg, func(counts *handlerCounts) { counts.acknowledged++ })
		}
		return produced, err
	}
}

// Runs is the innermost middleware.
func (c *counts) Runs(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) (produced []*message.Message, err error) {
		done := false
		defer func() { // also of a panic
			c.change(msg, func(counts *handlerCounts) {
				counts.runs++
				if !done || err != nil {
					counts.failed++
				}
			})
		}()
		produced, err = h(msg)
		done = true
		return produced, err
	}
}

func (c *counts) change(msg *message.Message, change func(*handlerCounts)) {
	handler := message.HandlerNameFromCtx(msg.Context())
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.byHandler[handler] == nil {
		c.byHandler[handler] = &handlerCounts{}
	}
	change(c.byHandler[handler])
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *counts) get(handler string) handlerCounts {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if counts := c.byHandler[handler]; counts != nil {
		return *counts
	}
	return handlerCounts{}
}

// wait waits until the handler has acknowledged that many deliveries.
func (c *counts) wait(ctx context.Context, handler string, deliveries int) error {
	for {
		c.mutex.Lock()
		changed := c.changed
		c.mutex.Unlock()
		if c.get(handler).acknowledged >= deliveries {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
