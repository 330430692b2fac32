package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
)

const (
	payments = 20
	copies   = 3
)

// newMessages makes the payments and a malformed one, as often as they are published, in any order.
func newMessages() []*message.Message {
	var messages []*message.Message
	for i := range payments + 1 {
		payload := `{"payment_id":`
		if i < payments {
			payload = fmt.Sprintf(`{"payment_id":"payment-%02d","account":"account-%d","amount_cents":%d}`, i+1, i%3, amount(i))
		}
		msg := message.NewMessage(watermill.NewUUID(), []byte(payload))
		for range copies {
			messages = append(messages, msg) // GoChannel copies it
		}
	}
	rand.Shuffle(len(messages), func(i, j int) { messages[i], messages[j] = messages[j], messages[i] })
	return messages
}

func amount(i int) int64 { return int64(1000 + 250*i) }

// expected is what there is to be when every message has its effect once.
func expected() effects {
	e := effects{rows: payments, poisoned: 1}
	for i := range payments {
		e.ledger += amount(i)
	}
	e.accounts = e.ledger
	return e
}

// failures happen after the handler has written half of what it has to, each of them once.
type failures struct {
	happened sync.Map
}

func (f *failures) next(paymentID string) error {
	if _, happened := f.happened.LoadOrStore(paymentID, true); happened {
		return nil
	}
	switch paymentID {
	case "payment-05":
		return errors.New("another service did not answer")
	case "payment-12":
		panic("a bug that shows now and then")
	}
	return nil
}

// deliveries counts what the router is given, and knows when all of it is acknowledged.
type deliveries struct {
	count   atomic.Int64
	pending sync.WaitGroup
}

func (d *deliveries) expect(messages int) { d.pending.Add(messages) }

func (d *deliveries) Middleware(h message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		d.count.Add(1)
		produced, err := h(msg)
		if err == nil { // the router acknowledges
			d.pending.Done()
		}
		return produced, err
	}
}

func (d *deliveries) wait(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		d.pending.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
