package inboxtest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/message/router/middleware"

	inbox "github.com/devmappa/watermill-inbox"
)

// What stands around the inbox in a router: one call adds it, and what can never succeed ends in the poison queue.
var routerCases = []kitCase{
	{"a message that always fails is poisoned after the retries, by a publisher that looks at its context", poisonedAfterRetries},
	{"a handler that always panics is poisoned after the retries", panicIsPoisonedAfterRetries},
	{"a handler that returns its incoming message is published at the first try, whatever the timeout", incomingMessageOutlivesTimeout},
	{"one delivery has one key, whatever the handler writes into the message", oneDeliveryHasOneKey},
	{"a failed attempt leaves the message as it was delivered", failedAttemptRestoresMessage},
	{"a handler that ends its transaction is poisoned at the first attempt", endedTransactionIsPoisonedAtOnce},
	{"only for the given handlers", addedToOneHandler},
	{"options that cannot be used are refused", routerOptionsAreRefused},
}

// fastRetry waits hardly.
var fastRetry = middleware.Retry{MaxRetries: 2, InitialInterval: time.Millisecond, MaxInterval: time.Millisecond, Multiplier: 1}

// poisonQueue is a publisher that honours the context of what it publishes, as many clients do.
type poisonQueue struct {
	mutex    sync.Mutex
	messages []*message.Message
}

func (p *poisonQueue) Publish(_ string, messages ...*message.Message) error {
	for _, msg := range messages {
		if err := msg.Context().Err(); err != nil {
			return err
		}
	}
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.messages = append(p.messages, messages...)
	return nil
}

func (p *poisonQueue) Close() error { return nil }

func (p *poisonQueue) ids() []string {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return message.Messages(p.messages).IDs()
}

// around starts a router to which the inbox is added by AddTo, with a poison queue, fast retries and a timeout.
func (k *kit) around(repository inbox.Repository, options inbox.Options, handler message.HandlerFunc) (*deliveries, *poisonQueue) {
	k.Helper()
	m := k.newMiddlewareWith(repository, options)
	d, poison := k.newDeliveries(m), &poisonQueue{}
	d.startRouterWith(true, handler, func(router *message.Router) error {
		router.AddMiddleware(d.observe)
		return m.AddTo(router, inbox.RouterOptions{PoisonPublisher: poison, PoisonTopic: "poison", Retry: fastRetry, Timeout: patience})
	})
	return d, poison
}

func poisonedAfterRetries(k *kit) {
	var runs atomic.Int32
	d, poison := k.around(k.Repository, inbox.Options{}, func(msg *message.Message) ([]*message.Message, error) {
		runs.Add(1)
		msg.Payload = []byte("changed")
		return nil, errors.Join(k.Write(msg.Context(), msg.UUID), errors.New("no funds"))
	})
	key := k.key()
	d.want(acked, key)
	k.wantRuns(&runs, 3)
	k.wantEffects()
	if got := poison.ids(); !slices.Equal(got, []string{key.MessageID}) || string(poison.messages[0].Payload) != "payload" {
		k.Fatalf("poisoned %q with payload %q", got, poison.messages[0].Payload)
	}
}

func panicIsPoisonedAfterRetries(k *kit) {
	var runs atomic.Int32
	d, poison := k.around(k.Repository, inbox.Options{}, func(msg *message.Message) ([]*message.Message, error) {
		runs.Add(1)
		_ = k.Write(msg.Context(), msg.UUID)
		panic("bad")
	})
	key := k.key()
	d.want(acked, key)
	k.wantRuns(&runs, 3)
	k.wantEffects()
	if got := poison.ids(); !slices.Equal(got, []string{key.MessageID}) {
		k.Fatalf("poisoned %q", got)
	}
}

func incomingMessageOutlivesTimeout(k *kit) {
	var runs atomic.Int32
	d, _ := k.around(k.Repository, inbox.Options{}, func(msg *message.Message) ([]*message.Message, error) {
		runs.Add(1)
		ctx := context.WithValue(msg.Context(), deliveryContextKey{}, "value")
		return []*message.Message{msg, message.NewMessageWithContext(ctx, "event", nil)}, nil
	})
	d.mutex.Lock()
	d.refuseEnded = true
	d.mutex.Unlock()
	d.want(acked, k.key())
	k.wantRuns(&runs, 1)
	if got := d.allAttempts(); len(got) != 1 || got[0][1].Context().Value(deliveryContextKey{}) != "value" {
		k.Fatalf("%d tries to publish, want 1 with the handler's values in the context", len(got))
	}
}

func oneDeliveryHasOneKey(k *kit) {
	// The answer of the first commit is lost after the handler has given the message another UUID.
	var lost atomic.Bool
	repository := NewFaultRepository(k.Repository, func(point FaultPoint, _ inbox.Key) error {
		if point == AfterCommit && lost.CompareAndSwap(false, true) {
			return errors.New("the answer is lost")
		}
		return nil
	})
	var runs atomic.Int32
	d, _ := k.around(repository, inbox.Options{}, func(msg *message.Message) ([]*message.Message, error) {
		runs.Add(1)
		err := k.Write(msg.Context(), "effect")
		msg.UUID = watermill.NewUUID()
		return []*message.Message{msg}, err
	})
	d.want(acked, k.key())
	k.wantRuns(&runs, 1)
	k.wantEffects("effect")
	if got := d.allPublished(); len(got) != 1 {
		k.Fatalf("published %q", message.Messages(got).IDs())
	}
}

func failedAttemptRestoresMessage(k *kit) {
	var seen []string
	handler := func(msg *message.Message) ([]*message.Message, error) {
		seen = append(seen, msg.UUID+" "+msg.Metadata.Get("field")+" "+msg.Metadata.Get("added")+" "+string(msg.Payload))
		msg.Metadata.Set("field", "changed")
		msg.Metadata.Set("added", "by the handler")
		if len(seen)%2 == 0 {
			msg.Metadata = nil
		}
		msg.UUID, msg.Payload = "changed", nil
		if len(seen) == 3 {
			panic("bad")
		}
		return nil, errors.New("no funds")
	}
	d, poison := k.around(k.Repository, inbox.Options{}, handler)
	msg := message.NewMessage(k.key().MessageID, []byte("payload"))
	msg.Metadata.Set("field", "value")
	want := msg.UUID + " value  payload"
	d.messages <- msg
	if got := d.wait(msg); got != acked {
		k.Fatalf("the message was %s", got)
	}
	if !slices.Equal(seen, []string{want, want, want}) {
		k.Fatalf("the attempts saw %q, want each time %q", seen, want)
	}
	poisoned := poison.messages[0]
	if poisoned.UUID != msg.UUID || string(poisoned.Payload) != "payload" || poisoned.Metadata.Get("field") != "value" || poisoned.Metadata.Get("added") != "" {
		k.Fatalf("poisoned %s %v %q", poisoned.UUID, poisoned.Metadata, poisoned.Payload)
	}
}

func endedTransactionIsPoisonedAtOnce(k *kit) {
	ways := map[string]func(context.Context) error{}
	if k.End != nil {
		ways["committed"] = k.End
	}
	if k.Abandon != nil {
		ways["rolled back"] = k.Abandon
	}
	for way, end := range ways {
		for name, after := range map[string]func() error{
			"nil":     func() error { return nil },
			"error":   func() error { return errors.New("too late") },
			"a panic": func() error { panic("too late") },
		} {
			var runs atomic.Int32
			d, poison := k.around(k.Repository, inbox.Options{}, func(msg *message.Message) ([]*message.Message, error) {
				runs.Add(1)
				if err := errors.Join(k.Write(msg.Context(), msg.UUID), end(msg.Context())); err != nil {
					return nil, err
				}
				return nil, after()
			})
			key := k.key()
			d.want(acked, key)
			if got := poison.ids(); runs.Load() != 1 || !slices.Equal(got, []string{key.MessageID}) {
				k.Fatalf("%s, then %s: %d runs, poisoned %q", way, name, runs.Load(), got)
			}
			if reason := poison.messages[0].Metadata.Get(middleware.ReasonForPoisonedKey); !strings.Contains(reason, inbox.ErrTransactionBroken.Error()) || !strings.Contains(reason, way) {
				k.Fatalf("%s, then %s: the reason is %q", way, name, reason)
			}
		}
	}
}

func addedToOneHandler(k *kit) {
	m := k.newMiddleware(k.Repository)
	d := k.newDeliveries(m)
	var runs atomic.Int32
	router, err := message.NewRouter(message.RouterConfig{CloseTimeout: patience}, watermill.NopLogger{})
	if err != nil {
		k.Fatal(err)
	}
	with := router.AddHandler(consumer, "incoming", d, d.topic, d, k.effect(&runs))
	other := newDeliveries(k.T, m)
	router.AddConsumerHandler("other", "incoming", other, func(*message.Message) error { runs.Add(1); return nil })
	if err := m.AddTo(router, inbox.RouterOptions{}, with); err != nil {
		k.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- router.Run(ctx) }()
	k.Cleanup(func() {
		cancel()
		<-stopped
	})
	<-router.Running()
	key := k.key()
	for range 2 {
		d.want(acked, key)
		other.want(acked, key)
	}
	k.wantRuns(&runs, 3)
}

func routerOptionsAreRefused(k *kit) {
	m := k.newMiddleware(k.Repository)
	router, err := message.NewRouter(message.RouterConfig{}, watermill.NopLogger{})
	if err != nil {
		k.Fatal(err)
	}
	retry := func(change func(*middleware.Retry)) inbox.RouterOptions {
		r := fastRetry
		change(&r)
		return inbox.RouterOptions{Retry: r}
	}
	for name, options := range map[string]inbox.RouterOptions{
		"a publisher without a topic":   {PoisonPublisher: &poisonQueue{}},
		"a topic without a publisher":   {PoisonTopic: "poison"},
		"a filter without a publisher":  {ShouldPoison: inbox.ShouldPoison},
		"a negative timeout":            {Timeout: -1},
		"a retry that does not wait":    retry(func(r *middleware.Retry) { r.InitialInterval = 0 }),
		"a retry without a longest":     retry(func(r *middleware.Retry) { r.MaxInterval = 0 }),
		"a retry that waits ever less":  retry(func(r *middleware.Retry) { r.Multiplier = 0.5 }),
		"a negative number of retries":  retry(func(r *middleware.Retry) { r.MaxRetries = -1 }),
		"a negative time for retries":   retry(func(r *middleware.Retry) { r.MaxElapsedTime = -1 }),
		"pauses that may be of no time": retry(func(r *middleware.Retry) { r.RandomizationFactor = 1 }),
	} {
		if err := m.AddTo(router, options); err == nil {
			k.Errorf("%s was taken", name)
		}
	}
	if err := m.AddTo(nil, inbox.RouterOptions{}); err == nil {
		k.Error("no router was taken")
	}
}
