package inboxtest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// Records are listed, found, counted and deleted through inbox.Records.
var recordsCases = []kitCase{
	{"consumers are listed with the database's time", consumersAreListed},
	{"records are found by consumer, id, time and whether they are unsent", recordsAreFound},
	{"nothing is forgotten without the right number", forgetNeedsTheRightNumber},
	{"a record that was claimed again since it was found is not deleted", recordClaimedAgainIsNotDeleted},
	{"statistics", statisticsOfConsumers},
}

func consumersAreListed(k *kit) {
	if consumers, now, err := k.records().Consumers(k.context()); err != nil || len(consumers) != 0 || time.Since(now).Abs() > time.Minute {
		k.Fatalf("of an empty inbox: %q, %s, %v", consumers, now, err)
	}
	for _, consumer := range []string{"b", "B", "a'", "b", "ä"} {
		k.process(inbox.Key{Consumer: consumer, MessageID: k.key().MessageID}, "effect")
	}
	consumers, now, err := k.records().Consumers(k.context())
	if want := []string{"B", "a'", "b", "ä"}; err != nil || !slices.Equal(consumers, want) || time.Since(now).Abs() > time.Minute {
		k.Fatalf("%q, %s, %v, want %q", consumers, now, err, want)
	}
}

func recordsAreFound(k *kit) {
	records := k.threeRecords()
	all := []inbox.Key{records.old, records.young, records.other}
	hourAgo := time.Now().Add(-time.Hour)
	for name, c := range map[string]struct {
		selection inbox.Selection
		want      []inbox.Key
	}{
		"all":          {inbox.Selection{}, all},
		"consumer":     {inbox.Selection{Consumer: "a"}, all[:2]},
		"message":      {inbox.Selection{MessageID: records.old.MessageID}, all[:1]},
		"key":          {inbox.Selection{Consumer: "b", MessageID: records.other.MessageID}, all[2:]},
		"nobody's key": {inbox.Selection{Consumer: "b", MessageID: records.old.MessageID}, nil},
		"from":         {inbox.Selection{From: hourAgo}, all[1:]},
		"to":           {inbox.Selection{To: hourAgo}, all[:1]},
		"from and to":  {inbox.Selection{From: hourAgo, To: hourAgo.Add(time.Second)}, nil},
		"older":        {inbox.Selection{OlderThan: time.Hour}, all[:1]},
		"unsent":       {inbox.Selection{Unsent: true}, all[2:]},
		"unsent of a":  {inbox.Selection{Unsent: true, Consumer: "a"}, nil},
	} {
		count, err := k.records().CountRecords(k.context(), c.selection)
		if err != nil || count != len(c.want) {
			k.Errorf("%s: %d are counted, %v, want %d", name, count, err, len(c.want))
		}
		found, err := k.records().FindRecords(k.context(), c.selection, inbox.Record{}, 10)
		if err != nil || !slices.EqualFunc(found, c.want, func(f inbox.Record, key inbox.Key) bool { return f.Key == key }) {
			k.Errorf("%s: found %v, %v, want %v", name, found, err, c.want)
		}
	}
	page, err := k.records().FindRecords(k.context(), inbox.Selection{}, inbox.Record{Key: all[0]}, 1)
	if err != nil || len(page) != 1 || page[0].Key != all[1] {
		k.Errorf("the page after %s is %v, %v", all[0], page, err)
	}
	found, err := k.records().FindRecords(k.context(), inbox.Selection{Consumer: "b"}, inbox.Record{}, 1)
	if err != nil || len(found) != 1 || string(found[0].Produced) != "unsent" || time.Since(found[0].ProcessedAt).Abs() > time.Minute {
		k.Errorf("found %+v, %v", found, err)
	}
}

func forgetNeedsTheRightNumber(k *kit) {
	records := k.threeRecords()
	selection := inbox.Selection{Consumer: "a"}
	for _, confirmed := range []int{0, 1, 3, -1} {
		deleted, err := inbox.Forget(k.context(), k.records(), selection, confirmed)
		var refused *inbox.NotConfirmedError
		if deleted != 0 || !errors.As(err, &refused) || refused.Selected != 2 || refused.Confirmed != confirmed {
			k.Fatalf("confirmed %d: %d forgotten, %v", confirmed, deleted, err)
		}
	}
	if _, err := inbox.Forget(k.context(), k.records(), inbox.Selection{}, 3); err == nil {
		k.Fatal("a selection without a consumer was taken")
	}
	if count, err := k.records().CountRecords(k.context(), inbox.Selection{}); count != 3 || err != nil {
		k.Fatalf("%d records are left, %v", count, err)
	}
	if deleted, err := inbox.Forget(k.context(), k.records(), selection, 2); deleted != 2 || err != nil {
		k.Fatalf("%d forgotten, %v", deleted, err)
	}
	if deleted, err := inbox.Forget(k.context(), k.records(), selection, 0); deleted != 0 || err != nil {
		k.Fatalf("nothing is left, and %d are forgotten, %v", deleted, err)
	}
	for _, key := range []inbox.Key{records.old, records.young} {
		_ = k.claim(k.context(), key).Rollback()
	}
	k.wantProcessed(records.other)
	if deleted, err := inbox.Forget(k.context(), k.records(), inbox.Selection{Consumer: "b", MessageID: records.other.MessageID}, 1); deleted != 1 || err != nil {
		k.Fatalf("%d forgotten of one key, %v", deleted, err)
	}
	_ = k.claim(k.context(), records.other).Rollback()
}

func recordClaimedAgainIsNotDeleted(k *kit) {
	selectionOf := func(key inbox.Key) inbox.Selection {
		return inbox.Selection{Consumer: key.Consumer, MessageID: key.MessageID}
	}
	forget := func(records inbox.Records, key inbox.Key) (int, error) {
		return inbox.Forget(k.context(), records, selectionOf(key), 1)
	}
	for name, remove := range map[string]func(inbox.Records, inbox.Key) (int, error){
		"Forget": forget,
		"Cleaner": func(records inbox.Records, _ inbox.Key) (int, error) {
			cleaner, err := inbox.NewCleaner(records, inbox.CleanerOptions{
				Consumers: inbox.AllConsumers(), Retention: inbox.Retention{Default: time.Hour}, UnsentRetention: time.Hour,
			})
			if err != nil {
				return 0, err
			}
			pass, err := cleaner.Pass(k.context())
			return pass.UnsentDeleted, err
		},
	} {
		key := k.key()
		k.processUnsent(key)
		if err := k.Age(k.context(), key, 2*time.Hour); err != nil {
			k.Fatal(err)
		}
		deleted, err := remove(&foundBefore{Records: k.records(), then: func() {
			// Another process deletes it as well, and then a copy of the message runs.
			selection := selectionOf(key)
			selection.Unsent = true
			found, err := k.records().FindRecords(k.context(), selection, inbox.Record{}, 2)
			if err != nil || len(found) != 1 {
				k.Fatalf("found %v, %v", found, err)
			}
			if _, err := k.records().DeleteRecords(k.context(), found); err != nil {
				k.Fatal(err)
			}
			k.processUnsent(key)
		}}, key)
		if deleted != 0 || err != nil {
			k.Errorf("%s: %d deleted, %v", name, deleted, err)
		}
		if k.wantProcessed(key).Produced == nil {
			k.Errorf("%s has deleted what the copy has stored", name)
		}
	}
}

func statisticsOfConsumers(k *kit) {
	if s, err := k.records().Statistics(k.context(), inbox.AllConsumers()); err != nil || len(s.Consumers) != 0 {
		k.Fatalf("of an empty inbox: %+v, %v", s, err)
	}
	k.threeRecords()
	s, err := k.records().Statistics(k.context(), inbox.AllConsumers())
	if err != nil || len(s.Consumers) != 2 || s.Bytes < 0 {
		k.Fatalf("%+v, %v", s, err)
	}
	a, b := s.Consumers[0], s.Consumers[1]
	if a.Consumer != "a" || a.Records != 2 || a.Unsent != 0 || a.LastDay != 1 || b.Consumer != "b" || b.Records != 1 || b.Unsent != 1 || b.LastDay != 1 {
		k.Errorf("%+v", s)
	}
	if age := time.Since(a.Oldest); (age-48*time.Hour).Abs() > time.Minute || time.Since(a.Newest).Abs() > time.Minute || !b.Oldest.Equal(b.Newest) {
		k.Errorf("%+v", s)
	}
	s, err = k.records().Statistics(k.context(), inbox.NamedConsumers("b", "c"))
	if err != nil || len(s.Consumers) != 1 || s.Consumers[0] != b {
		k.Errorf("of one service's consumers: %+v, %v", s, err)
	}
}

// foundBefore lets something happen once between the search for records and what is done with them.
type foundBefore struct {
	inbox.Records
	once sync.Once
	then func()
}

func (f *foundBefore) FindRecords(ctx context.Context, selection inbox.Selection, after inbox.Record, limit int) ([]inbox.Record, error) {
	found, err := f.Records.FindRecords(ctx, selection, after, limit)
	f.once.Do(f.then)
	return found, err
}

type threeRecords struct{ old, young, other inbox.Key }

// threeRecords are two of consumer "a", one of them two days old, and an unsent one of "b".
func (k *kit) threeRecords() threeRecords {
	k.Helper()
	records := threeRecords{
		old:   inbox.Key{Consumer: "a", MessageID: "1"},
		young: inbox.Key{Consumer: "a", MessageID: "2"},
		other: inbox.Key{Consumer: "b", MessageID: "3"},
	}
	k.process(records.old, "effect")
	k.process(records.young, "effect")
	k.processUnsent(records.other)
	if err := k.Age(k.context(), records.old, 48*time.Hour); err != nil {
		k.Fatal(err)
	}
	return records
}
