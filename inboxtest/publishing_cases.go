package inboxtest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// The router's publish of what a handler returned: it backs off, and its nil is the proof that the messages are sent.
var publishingCases = []kitCase{
	{"a publisher that is away for a while costs no delivery", publisherAwayForAWhile},
	{"a publisher that takes some of the messages each time gets them all", publisherTakesSome},
	{"a publisher that stays away is given up, and the message nacked", publisherStaysAway},
	{"a publish that backs off ends with its delivery", backOffEndsWithDelivery},
	{"a permanent error of the publisher is not tried again", permanentPublishError},
	{"an acknowledgement without a publish is reported, and the messages stay unsent", acknowledgedWithoutPublish},
	{"copies that another middleware makes of the messages prove as well", copiesProve},
	{"a middleware that drops or renames a message leaves the record unsent", droppedMessageStaysUnsent},
	{"a UUID that two messages share proves only the one that was published", sharedUUIDProvesOne},
	{"a forgotten decorator is reported", forgottenDecorator},
}

// publishes keeps what is observed of publishes.
type publishes struct {
	mutex sync.Mutex
	list  []inbox.PublishObservation
	seen  chan struct{} // gets one for each, when set
}

func (p *publishes) add(_ context.Context, observation inbox.PublishObservation) {
	p.mutex.Lock()
	p.list = append(p.list, observation)
	p.mutex.Unlock()
	if p.seen != nil {
		p.seen <- struct{}{}
	}
}

func (p *publishes) all() []inbox.PublishObservation {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return slices.Clone(p.list)
}

// wantUnsent fails the test unless the record's messages are or are not known to be sent.
func (k *kit) wantUnsent(key inbox.Key, want bool) {
	k.Helper()
	if got := k.wantProcessed(key).Produced != nil; got != want {
		k.Fatalf("%s is unsent: %v, want %v", key, got, want)
	}
}

func (k *kit) kitKey() inbox.Key { return inbox.Key{Consumer: consumer, MessageID: k.key().MessageID} }

func publisherAwayForAWhile(k *kit) {
	var (
		runs   atomic.Int32
		seen   publishes
		logger = newCapture()
	)
	d, _ := k.around(k.Repository, inbox.Options{PublishBackOff: patience, ObservePublish: seen.add, Logger: logger}, k.produce(&runs))
	d.failPublish(4)
	key := k.kitKey()
	d.want(acked, key)
	k.wantRuns(&runs, 1)
	if got := message.Messages(d.allPublished()).IDs(); len(got) != 1 {
		k.Fatalf("published %q", got)
	}
	if got := seen.all(); len(got) != 1 || got[0].Key != key || got[0].Tries != 5 || got[0].Err != nil || got[0].Duration < 500*time.Millisecond {
		k.Fatalf("observed %+v", got)
	}
	if got := logger.errors(); len(got) != 1 {
		k.Fatalf("error lines %q, want one", got)
	}
	d.flush()
	k.wantUnsent(key, false)
}

func publisherTakesSome(k *kit) {
	d, _ := k.around(k.Repository, inbox.Options{PublishBackOff: patience}, func(*message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("1", nil), message.NewMessage("2", nil), message.NewMessage("3", nil)}, nil
	})
	d.failPublishAfter(2, 2)
	key := k.kitKey()
	d.want(acked, key)
	if got := message.Messages(d.allPublished()).IDs(); !slices.Equal(got, []string{"1", "2", "1", "2", "1", "2", "3"}) {
		k.Fatalf("published %q", got)
	}
	d.flush()
	k.wantUnsent(key, false)
}

func publisherStaysAway(k *kit) {
	var (
		runs atomic.Int32
		seen publishes
	)
	d, poison := k.around(k.Repository, inbox.Options{PublishBackOff: 200 * time.Millisecond, ObservePublish: seen.add}, k.produce(&runs))
	d.failPublish(1000)
	key := k.kitKey()
	d.want(nacked, key)
	if got := seen.all(); len(got) != 1 || got[0].Err == nil || got[0].Tries < 2 || got[0].Tries > 10 {
		k.Fatalf("observed %+v", got)
	}
	k.wantUnsent(key, true)
	d.failPublish(0)
	d.want(acked, key)
	k.wantRuns(&runs, 1)
	if got := message.Messages(d.allPublished()).IDs(); len(got) != 1 || len(poison.ids()) != 0 {
		k.Fatalf("published %q, poisoned %q", got, poison.ids())
	}
	d.flush()
	k.wantUnsent(key, false)
}

func backOffEndsWithDelivery(k *kit) {
	d, _ := k.around(k.Repository, inbox.Options{PublishBackOff: time.Hour}, k.produce(new(atomic.Int32)))
	d.publishes = make(chan struct{}, 1000)
	d.failPublish(1000)
	ctx, cancel := context.WithCancel(k.context())
	defer cancel()
	key := k.kitKey()
	msg := d.start(key, ctx)
	<-d.publishes
	cancel() // as a subscriber does that closes
	if got := d.wait(msg); got != nacked {
		k.Fatalf("the message was %s", got)
	}
	k.wantUnsent(key, true)
}

func permanentPublishError(k *kit) {
	var seen publishes
	m := k.newMiddlewareWith(k.Repository, inbox.Options{PublishBackOff: time.Hour, ObservePublish: seen.add})
	d := k.newDeliveries(m)
	refuses := refusingPublisher{d}
	d.startRouterWith(true, k.produce(new(atomic.Int32)), func(router *message.Router) error {
		err := m.AddTo(router, inbox.RouterOptions{Retry: fastRetry})
		router.AddPublisherDecorators(func(message.Publisher) (message.Publisher, error) { return refuses, nil })
		return err
	})
	key := k.kitKey()
	d.want(nacked, key)
	if got := seen.all(); len(got) != 1 || got[0].Tries != 1 || got[0].Err == nil {
		k.Fatalf("observed %+v", got)
	}
	k.wantUnsent(key, true)
}

type refusingPublisher struct{ message.Publisher }

func (refusingPublisher) Publish(string, ...*message.Message) error {
	return inbox.Permanent(errors.New("the broker will never take it"))
}

// outside starts a router with a middleware between Retry and the inbox.
func (k *kit) outside(options inbox.Options, handler message.HandlerFunc, outside message.HandlerMiddleware) *deliveries {
	k.Helper()
	m := k.newMiddlewareWith(k.Repository, options)
	d := k.newDeliveries(m)
	d.startRouter(true, handler, m.Delivery, outside, m.Middleware)
	return d
}

func acknowledgedWithoutPublish(k *kit) {
	logger := newCapture()
	seen := publishes{seen: make(chan struct{}, 10)}
	d := k.outside(inbox.Options{ObservePublish: seen.add, Logger: logger}, k.produce(new(atomic.Int32)), func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			_, err := next(msg)
			return nil, err // as a poison queue that takes the message for another error
		}
	})
	keys := []inbox.Key{k.kitKey(), k.kitKey()}
	for _, key := range keys {
		d.want(acked, key)
		<-seen.seen
	}
	d.flush()
	for i, key := range keys {
		k.wantUnsent(key, true)
		if got := seen.all()[i]; got.Key != key || got.Tries != 0 || !errors.Is(got.Err, inbox.ErrNotPublished) {
			k.Fatalf("observed %+v", got)
		}
	}
	if got := logger.errors(); len(got) != 1 {
		k.Fatalf("error lines %q, want one for the handler", got)
	}
}

func copiesProve(k *kit) {
	d := k.outside(inbox.Options{}, k.produce(new(atomic.Int32)), func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := next(msg)
			for i, msg := range produced {
				produced[i] = msg.Copy()
				produced[i].Metadata.Set("added", "outside")
			}
			return produced, err
		}
	})
	key := k.kitKey()
	d.want(acked, key)
	d.flush()
	k.wantUnsent(key, false)
}

func droppedMessageStaysUnsent(k *kit) {
	for name, change := range map[string]func([]*message.Message) []*message.Message{
		"drops": func(produced []*message.Message) []*message.Message { return produced[:1] },
		"renames": func(produced []*message.Message) []*message.Message {
			renamed := produced[1].Copy()
			renamed.UUID = watermill.NewUUID()
			return []*message.Message{produced[0], renamed}
		},
	} {
		d := k.outside(inbox.Options{}, func(*message.Message) ([]*message.Message, error) {
			return []*message.Message{message.NewMessage("1", nil), message.NewMessage("2", nil)}, nil
		}, func(next message.HandlerFunc) message.HandlerFunc {
			return func(msg *message.Message) ([]*message.Message, error) {
				produced, err := next(msg)
				return change(produced), err
			}
		})
		key := k.kitKey()
		d.want(acked, key)
		d.flush()
		if k.wantProcessed(key).Produced == nil {
			k.Errorf("%s: the record was marked as sent", name)
		}
	}
}

func sharedUUIDProvesOne(k *kit) {
	// Two messages, whose handler always returns the same UUID. The first is held back until the second is published.
	processed, leave := make(chan struct{}), make(chan struct{})
	var held atomic.Bool
	d := k.outside(inbox.Options{}, func(msg *message.Message) ([]*message.Message, error) {
		return []*message.Message{message.NewMessage("constant", []byte(msg.UUID))}, nil
	}, func(next message.HandlerFunc) message.HandlerFunc {
		return func(msg *message.Message) ([]*message.Message, error) {
			produced, err := next(msg)
			if held.CompareAndSwap(false, true) {
				close(processed)
				<-leave
				return nil, errors.New("it fails after its work")
			}
			return produced, err
		}
	})
	first, second := k.kitKey(), k.kitKey()
	msg := d.start(first, k.context())
	<-processed
	d.want(acked, second)
	close(leave)
	if got := d.wait(msg); got != nacked {
		k.Fatalf("the first was %s", got)
	}
	d.flush()
	k.wantUnsent(first, true)
	k.wantUnsent(second, false)
}

func forgottenDecorator(k *kit) {
	logger := newCapture()
	seen := publishes{seen: make(chan struct{}, 1)}
	m := k.newMiddlewareWith(k.Repository, inbox.Options{ObservePublish: seen.add, Logger: logger})
	d := k.newDeliveries(m)
	d.startRouterWith(true, k.produce(new(atomic.Int32)), func(router *message.Router) error {
		router.AddMiddleware(m.Middleware)
		return nil
	})
	key := k.kitKey()
	d.want(acked, key)
	<-seen.seen
	d.flush()
	k.wantUnsent(key, true)
	if got := logger.errors(); len(got) != 1 {
		k.Fatalf("error lines %q", got)
	}
}
