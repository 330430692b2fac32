// A handler behind the inbox in a real router, one message at a time: for TestHandler and TestRepository.

package inboxtest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// deliveries runs a handler behind the inbox in a real router and hands it messages one by one.
type deliveries struct {
	t          testing.TB
	middleware *inbox.Middleware
	topic      string                     // to which the handler publishes
	inside     func(context.Context) bool // reports whether a transaction is found, when set
	messages   chan *message.Message

	mutex     sync.Mutex
	errors    []error
	attempts  [][]*message.Message // of publishing, the failed ones included
	published []*message.Message   // what the broker has taken
	fails     int                  // so many publishes
	takes     int                  // so many messages of a publish that fails
	publishes chan struct{}        // gets one for each attempt, when set

	refuseEnded bool // messages whose context has ended
}

func newDeliveries(t testing.TB, m *inbox.Middleware) *deliveries {
	return &deliveries{t: t, middleware: m, topic: publishTopic, messages: make(chan *message.Message)}
}

const (
	consumer     = "kit"
	publishTopic = "events"
)

// startRouter starts a router with the middlewares; it ends with the test.
func (d *deliveries) startRouter(withPublisher bool, handler message.HandlerFunc, middlewares ...message.HandlerMiddleware) {
	d.t.Helper()
	d.startRouterWith(withPublisher, handler, func(router *message.Router) error {
		router.AddPublisherDecorators(d.middleware.DecoratePublisher)
		router.AddMiddleware(d.observe)
		router.AddMiddleware(middlewares...)
		return nil
	})
}

// startRouterWith starts a router that the function has set up; it ends with the test.
func (d *deliveries) startRouterWith(withPublisher bool, handler message.HandlerFunc, setUp func(*message.Router) error) {
	d.t.Helper()
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience}, watermill.NopLogger{})
	if err == nil {
		err = setUp(router)
	}
	if err != nil {
		d.t.Fatal(err)
	}
	if withPublisher {
		router.AddHandler(consumer, "incoming", d, d.topic, d, handler)
	} else {
		router.AddConsumerHandler(consumer, "incoming", d, func(msg *message.Message) error {
			_, err := handler(msg)
			return err
		})
	}
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- router.Run(ctx) }()
	<-router.Running()
	d.t.Cleanup(func() {
		cancel()
		if err := <-stopped; err != nil {
			d.t.Errorf("the router stopped with: %v", err)
		}
		d.flush()
	})
}

// observe keeps what the middleware returned, and checks that it leaves the message's context alone.
func (d *deliveries) observe(next message.HandlerFunc) message.HandlerFunc {
	return func(msg *message.Message) ([]*message.Message, error) {
		before := msg.Context()
		defer func() {
			if msg.Context() != before {
				d.t.Error("the message's context was not restored")
			}
		}()
		produced, err := next(msg)
		d.mutex.Lock()
		defer d.mutex.Unlock()
		d.errors = append(d.errors, err)
		return produced, err
	}
}

// Subscribe, Publish and Close implement Watermill's Subscriber and Publisher.
func (d *deliveries) Subscribe(ctx context.Context, _ string) (<-chan *message.Message, error) {
	out := make(chan *message.Message)
	go func() {
		defer close(out)
		for {
			select {
			case msg := <-d.messages:
				out <- msg
			case <-ctx.Done():
				return
			}
		}
	}()
	return out, nil
}

func (d *deliveries) Publish(topic string, messages ...*message.Message) error {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	if topic != d.topic {
		d.t.Errorf("published to topic %q, want %q", topic, d.topic)
	}
	for _, msg := range messages {
		if d.inside != nil && d.inside(msg.Context()) {
			d.t.Error("a transaction is found in the context of a produced message after the commit")
		}
	}
	d.attempts = append(d.attempts, messages)
	if d.publishes != nil {
		d.publishes <- struct{}{}
	}
	for _, msg := range messages {
		if err := msg.Context().Err(); d.refuseEnded && err != nil {
			return err
		}
	}
	if d.fails > 0 {
		d.fails--
		d.published = append(d.published, messages[:min(d.takes, len(messages))]...)
		return errors.New("the broker is away")
	}
	d.published = append(d.published, messages...)
	return nil
}

func (d *deliveries) Close() error { return nil }

// failPublish lets the next publishes fail.
func (d *deliveries) failPublish(times int) { d.failPublishAfter(times, 0) }

// failPublishAfter lets the next publishes fail after the broker has taken some of the messages.
func (d *deliveries) failPublishAfter(times, takes int) {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	d.fails, d.takes = times, takes
}

// flush waits until what was acknowledged is marked as sent. The middleware marks nothing afterwards.
func (d *deliveries) flush() {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := d.middleware.Close(ctx); err != nil {
		d.t.Errorf("the middleware did not close: %v", err)
	}
}

// result is what became of a delivery.
type result string

const (
	acked   result = "acked"
	nacked  result = "nacked"
	neither result = "neither acked nor nacked"
)

// send delivers a copy of the message and waits for the answer.
func (d *deliveries) send(key inbox.Key, ctx context.Context) result {
	d.t.Helper()
	return d.wait(d.start(key, ctx))
}

func (d *deliveries) start(key inbox.Key, ctx context.Context) *message.Message {
	msg := message.NewMessageWithContext(ctx, key.MessageID, []byte("payload"))
	d.messages <- msg
	return msg
}

func (d *deliveries) wait(msg *message.Message) result {
	d.t.Helper()
	select {
	case <-msg.Acked():
		return acked
	case <-msg.Nacked():
		return nacked
	case <-time.After(patience):
		d.t.Fatalf("message %s was %s", msg.UUID, neither)
		return neither
	}
}

// want delivers the message and fails the test unless the answer is as wanted.
func (d *deliveries) want(want result, key inbox.Key) {
	d.t.Helper()
	if got := d.send(key, testContext(d.t)); got != want {
		d.t.Fatalf("message %s was %s, want it %s; errors: %v", key, got, want, d.allErrors())
	}
}

func (d *deliveries) allErrors() []error {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	return slices.Clone(d.errors)
}

// lastError is what the middleware returned last.
func (d *deliveries) lastError() error {
	errors := d.allErrors()
	if len(errors) == 0 {
		return nil
	}
	return errors[len(errors)-1]
}

func (d *deliveries) allAttempts() [][]*message.Message {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	return slices.Clone(d.attempts)
}

func (d *deliveries) allPublished() []*message.Message {
	d.mutex.Lock()
	defer d.mutex.Unlock()
	return slices.Clone(d.published)
}
