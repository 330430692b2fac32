package inboxamqp_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	inboxamqp "github.com/devmappa/watermill-inbox/amqp"
)

const patience = 10 * time.Second

func await[T any](t testing.TB, ch <-chan T, what string) (T, bool) {
	t.Helper()
	select {
	case v, ok := <-ch:
		return v, ok
	case <-time.After(patience):
		t.Fatalf("waited %s for %s", patience, what)
		panic("unreachable")
	}
}

// workQueue is a queue whose subscriptions share its messages, one in flight for each, as with RabbitMQ and
// a prefetch of 1. Like watermill-amqp it hands over a message without looking at the context.
type workQueue struct {
	queue  chan *message.Message
	failAt int // the Subscribe call that fails, counted from 1

	calls   atomic.Int32
	open    atomic.Int32
	acked   atomic.Int32
	nacked  atomic.Int32
	closing chan struct{}
	once    sync.Once
	closes  atomic.Int32
	err     error
	lock    sync.Mutex // no Add during Wait
	wg      sync.WaitGroup
}

var errSubscribe = errors.New("no more subscriptions")

func newWorkQueue(messages int) *workQueue {
	q := &workQueue{queue: make(chan *message.Message, messages), closing: make(chan struct{})}
	for i := range messages {
		q.queue <- message.NewMessage(fmt.Sprint(i), nil)
	}
	return q
}

func (q *workQueue) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	if int(q.calls.Add(1)) == q.failAt {
		return nil, errSubscribe
	}
	out := make(chan *message.Message)
	q.open.Add(1)
	q.lock.Lock()
	q.wg.Add(1)
	q.lock.Unlock()
	go func() {
		defer q.wg.Done()
		defer q.open.Add(-1)
		defer close(out)
		for {
			select {
			case <-ctx.Done():
				return
			case <-q.closing:
				return
			case msg := <-q.queue:
				if !q.handOver(ctx, msg, out) {
					return
				}
			}
		}
	}()
	return out, nil
}

func (q *workQueue) handOver(ctx context.Context, stored *message.Message, out chan<- *message.Message) (more bool) {
	msg := stored.Copy()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	msg.SetContext(ctx)
	select {
	case out <- msg:
	case <-q.closing:
		q.queue <- stored
		return false
	}
	select {
	case <-msg.Acked():
		q.acked.Add(1)
		return true
	case <-msg.Nacked():
		q.nacked.Add(1)
		q.queue <- stored
		return true
	case <-q.closing:
		q.queue <- stored
		return false
	}
}

func (q *workQueue) Close() error {
	q.closes.Add(1)
	q.once.Do(func() { close(q.closing) })
	q.lock.Lock()
	defer q.lock.Unlock()
	q.wg.Wait()
	return q.err
}

func (q *workQueue) mustHold(t *testing.T, messages int) {
	t.Helper()
	if got := len(q.queue) + int(q.acked.Load()); got != messages {
		t.Errorf("%d queued + %d acked, want %d in all", len(q.queue), q.acked.Load(), messages)
	}
}

type initializer struct {
	*workQueue
	topic string
}

func (i *initializer) SubscribeInitialize(topic string) error {
	i.topic = topic
	return errSubscribe
}

func concurrent(t testing.TB, inner message.Subscriber, n int) message.Subscriber {
	t.Helper()
	subscriber, err := inboxamqp.Concurrent(inner, n)
	if err != nil {
		t.Fatal(err)
	}
	return subscriber
}

func subscribe(t testing.TB, ctx context.Context, subscriber message.Subscriber) <-chan *message.Message {
	t.Helper()
	messages, err := subscriber.Subscribe(ctx, "topic")
	if err != nil {
		t.Fatal(err)
	}
	return messages
}

func mustClose(t testing.TB, subscriber message.Subscriber) {
	t.Helper()
	closed := make(chan error, 1)
	go func() { closed <- subscriber.Close() }()
	if err, _ := await(t, closed, "Close"); err != nil {
		t.Errorf("Close: %v", err)
	}
}

func TestConcurrentRefuses(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, -1} {
		if subscriber, err := inboxamqp.Concurrent(newWorkQueue(0), n); err == nil || subscriber != nil {
			t.Errorf("n = %d gives %v, %v", n, subscriber, err)
		}
	}
	if subscriber, err := inboxamqp.Concurrent(nil, 1); err == nil || subscriber != nil {
		t.Errorf("nil subscriber gives %v, %v", subscriber, err)
	}
}

func TestConcurrentIsOneHandlerWithNMessagesInFlight(t *testing.T) {
	t.Parallel()
	const n, total = 4, 40
	queue := newWorkQueue(total)
	subscriber := concurrent(t, queue, n)
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience}, watermill.NopLogger{})
	if err != nil {
		t.Fatal(err)
	}

	var inFlight, most atomic.Int32
	var names sync.Map
	arrived := make(chan struct{}, total)
	release := make(chan struct{})
	router.AddConsumerHandler("consumer", "topic", subscriber, func(msg *message.Message) error {
		names.Store(message.HandlerNameFromCtx(msg.Context()), true)
		for now := inFlight.Add(1); ; {
			if seen := most.Load(); now <= seen || most.CompareAndSwap(seen, now) {
				break
			}
		}
		defer inFlight.Add(-1)
		arrived <- struct{}{}
		<-release // none returns before n are here
		return nil
	})
	ran := make(chan error, 1)
	go func() { ran <- router.Run(context.Background()) }()
	for i := range n {
		await(t, arrived, fmt.Sprintf("handler %d to run beside the others", i+1))
	}
	close(release)
	for i := n; i < total; i++ {
		await(t, arrived, fmt.Sprintf("message %d", i+1))
	}
	if err := router.Close(); err != nil {
		t.Error(err)
	}
	await(t, ran, "the router to end")

	if most.Load() != n {
		t.Errorf("%d in flight, want %d", most.Load(), n)
	}
	names.Range(func(name, _ any) bool {
		if name != "consumer" {
			t.Errorf("handled by %q", name)
		}
		return true
	})
	queue.mustHold(t, total)
}

func TestConcurrentPartialFailure(t *testing.T) {
	t.Parallel()
	for failAt := 1; failAt <= 3; failAt++ {
		queue := newWorkQueue(10)
		queue.failAt = failAt
		subscriber := concurrent(t, queue, 3)

		messages, err := subscriber.Subscribe(context.Background(), "topic")
		if !errors.Is(err, errSubscribe) || messages != nil {
			t.Fatalf("failure of subscription %d gives %v, %v", failAt, messages, err)
		}
		// Nothing else has to happen for the others to end.
		ended := make(chan struct{})
		go func() { queue.wg.Wait(); close(ended) }()
		await(t, ended, "the earlier subscriptions to end")
		if queue.calls.Load() != int32(failAt) {
			t.Errorf("%d calls after failure of %d", queue.calls.Load(), failAt)
		}
		queue.mustHold(t, 10)

		// The subscriber is still usable.
		messages = subscribe(t, context.Background(), subscriber)
		msg, _ := await(t, messages, "a message")
		msg.Ack()
		mustClose(t, subscriber)
		queue.mustHold(t, 10)
	}
}

func TestConcurrentContextEndsWhileNobodyReads(t *testing.T) {
	t.Parallel()
	const n = 3
	queue := newWorkQueue(n)
	subscriber := concurrent(t, queue, n)
	ctx, cancel := context.WithCancel(context.Background())
	messages := subscribe(t, ctx, subscriber)

	// One message is with a handler, the others are or will be in the hands of forwarders.
	msg, _ := await(t, messages, "a message")
	cancel()
	if msg.Context().Err() == nil {
		t.Error("the message does not see the end of the subscription")
	}
	msg.Nack()

	for open := true; open; {
		var late *message.Message
		if late, open = await(t, messages, "the merged channel to be closed"); open {
			late.Nack() // a message may still win against the context
		}
	}
	if queue.open.Load() != 0 {
		t.Errorf("%d subscriptions are open", queue.open.Load())
	}
	queue.mustHold(t, n)
	if queue.closes.Load() != 0 {
		t.Error("the end of one subscription closed the subscriber")
	}
	mustClose(t, subscriber)
}

func TestConcurrentCloseWhileNobodyReads(t *testing.T) {
	t.Parallel()
	for range 50 { // where each forwarder stands when Close comes is a matter of luck
		const n = 3
		queue := newWorkQueue(10)
		queue.err = errSubscribe
		subscriber := concurrent(t, queue, n)
		first := subscribe(t, context.Background(), subscriber)
		second := subscribe(t, context.Background(), subscriber)
		await(t, first, "a message that is never answered")

		var closers sync.WaitGroup
		for range 3 {
			closers.Add(1)
			go func() {
				defer closers.Done()
				if err := subscriber.Close(); !errors.Is(err, errSubscribe) {
					t.Errorf("Close: %v, want the error of the inner subscriber", err)
				}
				if queue.open.Load() != 0 {
					t.Error("Close did not wait")
				}
			}()
		}
		closed := make(chan struct{})
		go func() { closers.Wait(); close(closed) }()
		await(t, closed, "Close")

		if queue.closes.Load() != 1 {
			t.Errorf("inner subscriber closed %d times", queue.closes.Load())
		}
		for _, messages := range []<-chan *message.Message{first, second} {
			if _, open := await(t, messages, "the merged channel"); open {
				t.Error("a message after Close")
			}
		}
		queue.mustHold(t, 10)
		if _, err := subscriber.Subscribe(context.Background(), "topic"); !errors.Is(err, inboxamqp.ErrClosed) {
			t.Errorf("Subscribe after Close: %v", err)
		}
	}
}

// A subscriber that ends on its own, one subscription after the other.
func TestConcurrentClosesWhenAllHaveEnded(t *testing.T) {
	t.Parallel()
	inner := make(channels, 2)
	inner <- make(chan *message.Message)
	inner <- make(chan *message.Message)
	a, b := <-inner, <-inner
	inner <- a
	inner <- b
	messages := subscribe(t, context.Background(), concurrent(t, inner, 2))

	close(a)
	want := message.NewMessage("still", nil)
	go func() { b <- want }()
	if got, _ := await(t, messages, "a message of the other subscription"); got != want {
		t.Fatalf("got %v", got)
	}
	close(b)
	if _, open := await(t, messages, "the merged channel"); open {
		t.Error("open after both have ended")
	}
}

// channels hands out prepared channels.
type channels chan chan *message.Message

func (c channels) Subscribe(context.Context, string) (<-chan *message.Message, error) {
	return <-c, nil
}
func (c channels) Close() error { return nil }

func TestConcurrentNothingIsLost(t *testing.T) {
	t.Parallel()
	const n, total = 5, 200
	queue := newWorkQueue(total)
	subscriber := concurrent(t, queue, n)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	messages := subscribe(t, ctx, subscriber)

	seen := 0
	for msg := range messages {
		seen++
		switch {
		case seen == total/2:
			cancel() // in the middle of the work
			msg.Nack()
		case seen%3 == 0:
			msg.Nack()
		default:
			msg.Ack()
		}
	}
	mustClose(t, subscriber)
	queue.mustHold(t, total)
}

func TestConcurrentSubscribeInitialize(t *testing.T) {
	t.Parallel()
	if _, there := concurrent(t, newWorkQueue(0), 2).(message.SubscribeInitializer); there {
		t.Error("promises an initialization that the inner subscriber does not have")
	}
	inner := &initializer{workQueue: newWorkQueue(1)}
	subscriber := concurrent(t, inner, 2)
	err := subscriber.(message.SubscribeInitializer).SubscribeInitialize("topic")
	if !errors.Is(err, errSubscribe) || inner.topic != "topic" {
		t.Errorf("initialized %q: %v", inner.topic, err)
	}
	msg, _ := await(t, subscribe(t, context.Background(), subscriber), "a message")
	msg.Ack()
	mustClose(t, subscriber)
}

func TestConcurrentSubscribeDuringClose(t *testing.T) {
	t.Parallel()
	for range 100 {
		queue := newWorkQueue(3)
		subscriber := concurrent(t, queue, 2)
		subscribed := make(chan struct{})
		go func() {
			defer close(subscribed)
			messages, err := subscriber.Subscribe(context.Background(), "topic")
			if err != nil {
				return
			}
			for msg := range messages {
				msg.Ack()
			}
		}()
		mustClose(t, subscriber)
		await(t, subscribed, "the subscription to end")
		queue.mustHold(t, 3)
	}
}
