//go:build unix

package main

import (
	"container/heap"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	amqp091 "github.com/rabbitmq/amqp091-go"
)

// publisher is the rest of the world: it sends payments, several times, late and out of order, and again
// whatever the broker has not confirmed. Its connection is direct, the broker is not always there.
type publisher struct {
	arena  *arena
	random *rand.Rand

	mutex    sync.Mutex
	payments map[string]*sentPayment
	due      sendings
	sent     int // messages confirmed
	again    int // sent again because a confirm was missing
	returned int // by the broker, which had no such queue
	repaired int // sent again because a queue was deleted
	deleted  map[string]time.Time
}

// sentPayment is a payment, and since when each queue is known to have had it.
type sentPayment struct {
	payment
	confirmed map[string]time.Time // the last time a publish began that was confirmed, by queue
}

// sending is a message to be sent at a time.
type sending struct {
	at      time.Time
	queue   string
	payment *sentPayment
}

// batch is how many messages wait for their confirms together.
const batch = 50

func newPublisherOf(a *arena, random *rand.Rand) *publisher {
	return &publisher{arena: a, random: random, payments: map[string]*sentPayment{}, deleted: map[string]time.Time{}}
}

// create makes payments, to be sent now and then.
func (p *publisher) create(n int) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for range n {
		made := &sentPayment{confirmed: map[string]time.Time{}, payment: payment{
			ID:    fmt.Sprintf("payment-%06d-%016x", len(p.payments), p.random.Uint64()),
			Cents: 1 + p.random.Int64N(100_000),
		}}
		p.payments[made.ID] = made
		for _, queue := range []string{bookings, audits} {
			for range 1 + p.random.IntN(4) {
				at := time.Now()
				if p.random.IntN(3) == 0 { // late, and so behind others
					at = at.Add(time.Duration(p.random.Int64N(int64(4 * time.Second))))
				}
				heap.Push(&p.due, sending{at, queue, made})
			}
		}
	}
}

// repair sends a payment again to a queue.
func (p *publisher) repair(id, queue string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.repaired++
	heap.Push(&p.due, sending{time.Now(), queue, p.payments[id]})
}

// queueDeleted is called when a queue is there again.
func (p *publisher) queueDeleted(queue string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.deleted[queue] = time.Now()
}

// mustArrive reports whether the broker has promised a copy of the payment that no deletion of the queue has
// taken.
func (p *publisher) mustArrive(id, queue string) bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.payments[id].confirmed[queue].After(p.deleted[queue])
}

// pending is how many messages are still to be sent, late ones included.
func (p *publisher) pending() int {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return len(p.due)
}

// run sends what is due until the context ends.
func (p *publisher) run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := p.connected(ctx); err != nil && ctx.Err() == nil {
			_ = pause(ctx, 200*time.Millisecond) // the broker is away
		}
	}
}

func (p *publisher) connected(ctx context.Context) error {
	conn, err := amqp091.DialConfig(p.arena.rabbitmq.URI(), amqp091.Config{Heartbeat: heartbeat})
	if err != nil {
		return err
	}
	defer conn.Close()
	channel, err := conn.Channel()
	if err != nil {
		return err
	}
	if err := channel.Confirm(false); err != nil {
		return err
	}
	// A message is returned before it is confirmed.
	returns := channel.NotifyReturn(make(chan amqp091.Return, batch))
	for {
		now := p.next()
		if len(now) == 0 {
			if err := pause(ctx, 10*time.Millisecond); err != nil {
				return err
			}
			continue
		}
		unconfirmed, err := p.send(ctx, channel, now)
		p.account(now, unconfirmed, returns)
		if err != nil {
			return err
		}
	}
}

// next takes what is due, as much as a batch.
func (p *publisher) next() (now []sending) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for len(p.due) > 0 && len(now) < batch && !p.due[0].at.After(time.Now()) {
		now = append(now, heap.Pop(&p.due).(sending))
	}
	begin := time.Now()
	for i := range now {
		now[i].at = begin
	}
	return now
}

// send publishes a batch and returns which of it are not confirmed.
func (p *publisher) send(ctx context.Context, channel *amqp091.Channel, now []sending) (unconfirmed map[int]bool, err error) {
	unconfirmed = map[int]bool{}
	for i := range now {
		unconfirmed[i] = true
	}
	confirmations := make([]*amqp091.DeferredConfirmation, len(now))
	for i, s := range now {
		body, err := json.Marshal(s.payment.payment)
		if err != nil {
			return unconfirmed, err
		}
		confirmations[i], err = channel.PublishWithDeferredConfirmWithContext(ctx, "", s.queue, true, false, amqp091.Publishing{
			MessageId: s.payment.ID, DeliveryMode: amqp091.Persistent, Body: body, CorrelationId: fmt.Sprint(i),
		})
		if err != nil {
			return unconfirmed, err
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for i, confirmation := range confirmations {
		confirmed, err := confirmation.WaitContext(ctx)
		if err != nil {
			return unconfirmed, err
		}
		if !confirmed {
			return unconfirmed, errors.New("refused")
		}
		delete(unconfirmed, i)
	}
	return unconfirmed, nil
}

func (p *publisher) account(now []sending, unconfirmed map[int]bool, returns <-chan amqp091.Return) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for len(returns) > 0 {
		var i int
		if r, ok := <-returns; ok {
			if _, err := fmt.Sscan(r.CorrelationId, &i); err == nil && i < len(now) {
				p.returned++
				unconfirmed[i] = true
			}
		}
	}
	for i, s := range now {
		if unconfirmed[i] {
			p.again++
			heap.Push(&p.due, sending{time.Now().Add(200 * time.Millisecond), s.queue, s.payment})
			continue
		}
		p.sent++
		s.payment.confirmed[s.queue] = s.at
	}
}

// sendings is a heap by time.
type sendings []sending

func (s sendings) Len() int           { return len(s) }
func (s sendings) Less(a, b int) bool { return s[a].at.Before(s[b].at) }
func (s sendings) Swap(a, b int)      { s[a], s[b] = s[b], s[a] }
func (s *sendings) Push(x any)        { *s = append(*s, x.(sending)) }
func (s *sendings) Pop() any {
	last := len(*s) - 1
	x := (*s)[last]
	*s = (*s)[:last]
	return x
}

func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// amounts are all payments with their cents.
func (p *publisher) amounts() map[string]int64 {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	amounts := map[string]int64{}
	for id, sent := range p.payments {
		amounts[id] = sent.Cents
	}
	return amounts
}
